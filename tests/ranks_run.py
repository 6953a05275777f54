"""Runs of the shipped policy on one or two ranks that sample the same completions, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from logra_lightning import (
    AdamWOptions,
    KLBudget,
    PolicyModule,
    RelativeRowAdam,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchDDPStrategy,
    SketchStrategy,
)
from logra_lightning.seeding import derive_seed
from logra_lightning.types import Completion
from tests.quiet_engine import QuietEngine
from tests.runs import data, policy, trainer


class Scripted(QuietEngine):
    """Completions that depend on the prompt and the call alone, so every split samples the same."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        num_completions: int,
        seed: int,
    ) -> list[list[Completion]]:
        self.calls += 1
        groups = []
        for ids in prompt_ids:
            generator = torch.Generator().manual_seed(derive_seed(str(ids), self.calls))
            group = []
            for i in range(num_completions):
                length = 1 + (sum(ids) + i) % sampling.max_tokens  # unequal among ranks
                tokens = torch.randint(3, 13, (length,), generator=generator).tolist()
                logprobs = -2 * torch.rand(length, generator=generator)
                group.append(Completion(tokens, logprobs, truncated=length > 5))
            groups.append(group)
        return groups


def many_tokens(completion_ids: list[int]) -> float:
    return float(sum(completion_ids) % 7)


def build(**options: Any) -> PolicyModule:
    defaults: dict[str, Any] = {
        "rewards": [Reward(many_tokens)],
        "engine": Scripted(),
        "train_others": True,
        "adamw": AdamWOptions(lr=1e-3, eps=1e-3),
        "optimizer": lambda *args: RelativeRowAdam(*args, update_ratio=1e-2),
        "max_tokens_per_microbatch": 80,
    }
    return policy(**(defaults | options))


def run(folder: Path, ranks: int, module: PolicyModule, steps: int = 3, **options: Any) -> Any:
    """Train `module` and return the trainer."""
    strategy = SketchDDPStrategy(rank=32) if ranks > 1 else SketchStrategy(rank=32)
    ckpt_path = options.pop("ckpt_path", None)
    budget = KLBudget(1e-3, 1e-4, 6, max_scale=100, probe_rollouts=10_000, bf16_every=0)
    defaults: dict[str, Any] = {"callbacks": [SketchAccumulation(), budget], "devices": ranks}
    made = trainer(folder, steps, **({"strategy": strategy} | defaults | options))
    made.fit(module, datamodule=data(folder), ckpt_path=ckpt_path)
    return made
