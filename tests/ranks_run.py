"""Runs of the shipped policy on one or two ranks that sample the same completions, for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
from logra_lightning.seeding import derive_seed
from logra_lightning.types import Completion
from tests.conftest import TINY_POLICY
from tests.quiet_engine import QuietEngine
from tests.runs import data, policy, run_ranks, trainer, weights

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
                length = 1 + (sum(ids) + i) % sampling.max_tokens  # unequal among ranks
                tokens = torch.randint(3, 13, (length,), generator=generator).tolist()
                logprobs = -2 * torch.rand(length, generator=generator)
                group.append(Completion(tokens, logprobs, truncated=length > 5))
            groups.append(group)
        return groups


def many_tokens(completion_ids: list[int]) -> float:
    return float(sum(completion_ids) % 7)


def own_folder(folder: Path) -> tuple[int, Path]:
    """This rank's number, and a folder that the others do not write to."""
    rank = int(os.environ.get("RANK", 0))
    mine = folder / f"rank{rank}"
    mine.mkdir(exist_ok=True)
    return rank, mine


def run_script(script: str, folder: Path) -> Path:
    """Run a script in two ranks, beside `uneven_policy`; `{folder}` in it stands for the folder."""
    uneven_policy(folder / "uneven")
    run_ranks(script.format(folder=str(folder)), folder)
    return folder


def assert_resumes_exactly(folder: Path, strategy: str, precision: str) -> None:
    """Six steps of two ranks are three and, from a checkpoint, three more, bit for bit."""
    _, mine = own_folder(folder)

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


def uneven_policy(folder: Path) -> str:
    """A policy whose rows do not share out evenly, with a head of its own."""
    config = LlamaConfig.from_pretrained(TINY_POLICY)
    config.hidden_size, config.head_dim, config.intermediate_size = 48, 12, 81
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(folder)
    return str(folder)


class FirstSketches(Callback):
    """Keeps the first step's sums of all ranks."""

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


def run(folder: Path, ranks: int, module: PolicyModule, steps: int = 3, **options: Any) -> Any:
    """Train `module` and return the trainer."""
    strategy = options.pop("strategy", "sketch_ddp" if ranks > 1 else "sketch")
    if strategy in STRATEGIES:
        strategy = STRATEGIES[strategy](rank=32)
    ckpt_path, more = options.pop("ckpt_path", None), options.pop("more", [])
    budget = KLBudget(1e-3, 1e-4, 6, max_scale=100, probe_rollouts=10_000, bf16_every=0)
    callbacks = [SketchAccumulation(), budget, *more]
    defaults: dict[str, Any] = {"callbacks": callbacks, "devices": ranks}
    made = trainer(folder, steps, strategy=strategy, **(defaults | options))
    made.fit(module, datamodule=data(folder), ckpt_path=ckpt_path)
    return made
