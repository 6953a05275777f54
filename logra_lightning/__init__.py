"""RL post-training of language models with gradient sketches, as PyTorch Lightning parts.

Importing this package registers the strategy `sketch`; it imports neither vllm nor datasets.
"""

from logra_lightning.callbacks import (
    EngineCheck,
    KLBudget,
    RolloutLogger,
    RunSummary,
    SketchAccumulation,
    WeightSync,
)
from logra_lightning.data import (
    GymSpec,
    MixedDataModule,
    PromptDataModule,
    PromptSource,
    ReasoningGymDataModule,
)
from logra_lightning.engines import TorchEngine, VLLMEngine
from logra_lightning.module import PolicyModule
from logra_lightning.optim import AdamWOptions, RelativeRowAdam, RowAdam
from logra_lightning.rewards import Reward
from logra_lightning.strategy import SketchDDPStrategy, SketchFSDPStrategy, SketchStrategy
from logra_lightning.types import PromptBatch, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AdamWOptions",
    "EngineCheck",
    "GymSpec",
    "KLBudget",
    "MixedDataModule",
    "PolicyModule",
    "PromptBatch",
    "PromptDataModule",
    "PromptSource",
    "ReasoningGymDataModule",
    "RelativeRowAdam",
    "Reward",
    "RolloutLogger",
    "RowAdam",
    "RunSummary",
    "SamplingParams",
    "SketchAccumulation",
    "SketchDDPStrategy",
    "SketchFSDPStrategy",
    "SketchStrategy",
    "TorchEngine",
    "VLLMEngine",
    "WeightSync",
]
