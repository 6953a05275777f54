"""RL post-training of language models with gradient sketches, as PyTorch Lightning parts.

The names below are loaded when they are first used: importing the package imports neither torch,
lightning, transformers, vllm nor datasets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from logra_lightning.objective import ObjectiveOptions
    from logra_lightning.optim import AdamWOptions, RelativeRowAdam, RowAdam
    from logra_lightning.policy import MemoryOptions
    from logra_lightning.rewards import Reward
    from logra_lightning.rollout import EvaluationOptions
    from logra_lightning.strategy import SketchDDPStrategy, SketchFSDPStrategy, SketchStrategy
    from logra_lightning.types import PromptBatch, SamplingParams

__version__ = "0.1.0"

_ROOMS = {
    "callbacks": (
        "EngineCheck",
        "KLBudget",
        "RolloutLogger",
        "RunSummary",
        "SketchAccumulation",
        "WeightSync",
    ),
    "data": (
        "GymSpec",
        "MixedDataModule",
        "PromptDataModule",
        "PromptSource",
        "ReasoningGymDataModule",
    ),
    "engines": ("TorchEngine", "VLLMEngine"),
    "module": ("PolicyModule",),
    "objective": ("ObjectiveOptions",),
    "optim": ("AdamWOptions", "RelativeRowAdam", "RowAdam"),
    "policy": ("MemoryOptions",),
    "rewards": ("Reward",),
    "rollout": ("EvaluationOptions",),
    "strategy": ("SketchDDPStrategy", "SketchFSDPStrategy", "SketchStrategy"),
    "types": ("PromptBatch", "SamplingParams"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AdamWOptions",
    "EngineCheck",
    "EvaluationOptions",
    "GymSpec",
    "KLBudget",
    "MemoryOptions",
    "MixedDataModule",
    "ObjectiveOptions",
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


def __getattr__(name: str) -> Any:
    """A public name, imported from its room now and kept."""
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
