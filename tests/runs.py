"""A run of the shipped policy that takes a second or two, for tests of the module and callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from logra_lightning import (
    PolicyModule,
    PromptDataModule,
    RelativeRowAdam,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.distributed.sharding import whole
from tests.conftest import TINY_POLICY, write_sums


def digits(completion: str) -> float:
    """A reward with signal in most groups: the sum of the digits."""
    return float(sum(int(c) for c in completion if c.isdigit()))


def policy(kind: type[PolicyModule] = PolicyModule, **options: Any) -> PolicyModule:
    defaults: dict[str, Any] = {
        "model": str(TINY_POLICY),
        "rewards": [Reward(digits)],
        "group_size": 4,
        "sampling": SamplingParams(max_tokens=6),
        "engine": TorchEngine(),
        "optimizer": lambda *args: RelativeRowAdam(*args, update_ratio=1e-2),
    }
    return kind(**(defaults | options))


def data(tmp_path: Path, **options: Any) -> PromptDataModule:
    path = write_sums(tmp_path / "sums.jsonl", 24)
    return PromptDataModule(
        path, str(TINY_POLICY), **({"prompts_per_step": 4, "val_size": 8} | options)
    )


def trainer(tmp_path: Path, steps: int = 2, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": SketchStrategy(rank=32),
        "callbacks": [SketchAccumulation()],
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**(defaults | options))


def weights(module: PolicyModule) -> dict[str, torch.Tensor]:
    """All rows of all weights; where they are sharded, every process must call it."""
    return {name: whole(value).clone() for name, value in module.state_dict().items()}


def fit(tmp_path: Path, module: PolicyModule, **options: Any) -> Trainer:
    run = trainer(tmp_path, **options)
    run.fit(module, datamodule=data(tmp_path))
    return run
