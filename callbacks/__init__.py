"""Callbacks for any Lightning project: import them from `logra_lightning.callbacks`."""

if __name__ == "callbacks":
    # The folder stands at the root of the repository. Imported from there, every class would exist
    # a second time.
    raise ImportError("import logra_lightning.callbacks instead of callbacks")

import logra_lightning.strategy  # noqa: F401  (registers the strategies, for Trainer(strategy="sketch"))
from logra_lightning.callbacks.engine_check import EngineCheck
from logra_lightning.callbacks.eval_table import EvalTable
from logra_lightning.callbacks.hf_export import HFExport
from logra_lightning.callbacks.kl_budget import KLBudget
from logra_lightning.callbacks.preemption import Preemption
from logra_lightning.callbacks.rollout_logger import RolloutLogger
from logra_lightning.callbacks.run_summary import RunSummary
from logra_lightning.callbacks.sketch_accumulation import SketchAccumulation
from logra_lightning.callbacks.step_checkpoint import StepCheckpoint
from logra_lightning.callbacks.step_progress import StepProgressBar
from logra_lightning.callbacks.throughput import Throughput
from logra_lightning.callbacks.validate_at_ends import ValidateAtEnds
from logra_lightning.callbacks.weight_sync import WeightSync

__all__ = [
    "EngineCheck",
    "EvalTable",
    "HFExport",
    "KLBudget",
    "Preemption",
    "RolloutLogger",
    "RunSummary",
    "SketchAccumulation",
    "StepCheckpoint",
    "StepProgressBar",
    "Throughput",
    "ValidateAtEnds",
    "WeightSync",
]
