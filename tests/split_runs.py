"""Runs of the shipped policy that sample the same, however many processes share the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from logra_lightning import (
    AdamWOptions,
    KLBudget,
    MemoryOptions,
    PolicyModule,
    RelativeRowAdam,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchDDPStrategy,
    SketchFSDPStrategy,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.distributed.processes import process_index
from logra_lightning.seeding import derive_seed
from logra_lightning.types import Completion
from tests.quiet_engine import QuietEngine
from tests.runs import data, policy, trainer, weights

STRATEGIES = {
    "sketch": SketchStrategy,
    "sketch_ddp": SketchDDPStrategy,
    "sketch_fsdp": SketchFSDPStrategy,
}


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
                length = 1 + (sum(ids) + i) % sampling.max_tokens  # the processes' totals differ
                tokens = torch.randint(3, 13, (length,), generator=generator).tolist()
                logprobs = -2 * torch.rand(length, generator=generator)
                group.append(Completion(tokens, logprobs, truncated=length > 5))
            groups.append(group)
        return groups


def many_tokens(completion_ids: list[int]) -> float:
    return float(sum(completion_ids) % 7)


def own_folder(folder: Path) -> Path:
    """A folder that the other process does not write to."""
    mine = folder / f"process{process_index()}"
    mine.mkdir(exist_ok=True)
    return mine


class FirstSketches(Callback):
    """Keeps the sketches of the first step, added up over all processes."""

    flat: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if self.flat is None:
            self.flat = trainer.strategy.sketches.flat.clone()


def build(**options: Any) -> PolicyModule:
    defaults: dict[str, Any] = {
        "rewards": [Reward(many_tokens)],
        "engine": Scripted(),
        "train_others": True,
        "adamw": AdamWOptions(lr=1e-3, eps=1e-3),
        "optimizer": lambda *args: RelativeRowAdam(*args, update_ratio=1e-2),
        "memory": MemoryOptions(80),
    }
    return policy(**(defaults | options))


def run(folder: Path, processes: int, module: PolicyModule, steps: int = 3, **options: Any) -> Any:
    """Train `module`, in one process or in each of two, and return the trainer."""
    strategy = options.pop("strategy", "sketch_ddp" if processes > 1 else "sketch")
    if strategy in STRATEGIES:
        strategy = STRATEGIES[strategy](rank=32)
    ckpt_path, more = options.pop("ckpt_path", None), options.pop("more", [])
    budget = KLBudget(1e-3, 1e-4, 6, max_scale=100, probe_rollouts=10_000, bf16_every=0)
    callbacks = [SketchAccumulation(), budget, *more]
    defaults: dict[str, Any] = {"callbacks": callbacks, "devices": processes}
    made = trainer(folder, steps, strategy=strategy, **(defaults | options))
    made.fit(module, datamodule=data(folder), ckpt_path=ckpt_path)
    return made


def logged_by(made: Any) -> dict[str, float]:
    """The last values of a run's metrics but its times."""
    metrics = made.callback_metrics.items()
    return {name: float(value) for name, value in metrics if not name.startswith("time/")}


def resume_exactly(folder: Path, strategy: str, precision: str) -> None:
    """In both processes: six steps are three and, from a checkpoint, three more, bit for bit."""
    mine = own_folder(folder)

    def fit(steps: int, **more: Any) -> tuple[PolicyModule, Any]:
        module = build(engine=TorchEngine())
        options: dict[str, Any] = {"strategy": strategy, "precision": precision, **more}
        return module, run(mine, 2, module, steps=steps, **options)

    straight, _ = fit(6)
    _, stopped = fit(3)
    stopped.save_checkpoint(folder / "half.ckpt")
    resumed, _ = fit(6, ckpt_path=folder / "half.ckpt")
    found = weights(resumed)
    for name, value in weights(straight).items():
        assert torch.equal(value, found[name]), (strategy, precision, name)
