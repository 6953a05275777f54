"""The KL of a bf16 policy's step against fp32, over five decades of its size, and what each costs.

    python benchmarks/kl_accuracy.py --model FOLDER            # of SmolLM2-135M-Instruct
    python benchmarks/kl_accuracy.py --model FOLDER --check    # exit 1 where a target is missed

One batch of rollouts of "which of two numbers is larger" per precision gives a gradient; its step
is scaled to each size, and its KL taken by `kl_budget.method: forward_ad` and by `fp32`, the
oracle, on the same tokens. Prints one table per precision. The targets: a difference of at most 5%,
and, where the CPU has bf16 instructions, no more time than the oracle takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.larger_number import LargerNumber, larger  # noqa: E402
from logra_lightning import (  # noqa: E402
    KLBudget,
    PolicyModule,
    RelativeRowAdam,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.start_line import has_native_bf16  # noqa: E402

SIZES = (2e-6, 2e-5, 2e-4, 2e-3, 2e-2, 1e-1)  # nats per token
ERROR = 0.05
PRECISIONS = ("bf16-true", "bf16-mixed")


class BothWays(KLBudget):
    """Takes the KL of the first step both ways at every size, then makes it as usual."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[tuple[float, float, float]] = []
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        proposal = optimizer.propose()
        assert not proposal.problem, proposal.problem
        assert not proposal.is_zero, "all rewards are equal: more prompts are needed"
        probe = pl_module.kl_probe(self.probe_rollouts, self.probe_max_tokens)
        scales: list[float] = []
        found: dict[str, list[float]] = {}
        for method in ("forward_ad", "fp32"):
            self.method = method
            step, precision = self._step_kl(trainer, probe, proposal, optimizer)
            with precision:
                start = time.perf_counter()
                q = step.predict()
                scales = scales or [(size / q) ** 0.5 for size in SIZES]
                found[method] = [step.measure(scale) for scale in scales[:1]]
                self.seconds[method] = time.perf_counter() - start
                found[method] += [step.measure(scale) for scale in scales[1:]]
                self.tokens = sum(len(hidden) for hidden, _ in step.start)
        self.rows = list(zip(SIZES, found["forward_ad"], found["fp32"], strict=True))
        super().on_before_optimizer_step(trainer, pl_module, optimizer)


def compare(model: str, precision: Any, rank: int, rollouts: int, folder: str) -> BothWays:
    seed_everything(0)
    both = BothWays(probe_rollouts=rollouts)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        strategy=SketchStrategy(rank=rank),
        callbacks=[SketchAccumulation(), both],
        max_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    module = PolicyModule(
        model=model,
        rewards=[Reward(larger)],
        group_size=4,
        sampling=SamplingParams(max_tokens=8),
        engine=TorchEngine(),
        optimizer=lambda *args: RelativeRowAdam(*args, update_ratio=1e-3),
    )
    data = LargerNumber(model, system_prompt="Answer with one number.", prompts_per_step=8)
    trainer.fit(module, datamodule=data)
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description="The KL of a bf16 step against the fp32 oracle.")
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rollouts", type=int, default=16, help="of the probe")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    args = parser.parse_args()
    good = True
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            both = compare(args.model, precision, args.rank, args.rollouts, folder)
        ours, oracle = both.seconds["forward_ad"], both.seconds["fp32"]
        threads = torch.get_num_threads()
        print(f"\n{precision}, {both.tokens} tokens of completions, {threads} threads")
        print("| KL asked for | forward_ad | fp32 | difference |\n|---|---|---|---|")
        for size, found, exact in both.rows:
            error = found / exact - 1
            good &= abs(error) <= ERROR
            print(f"| {size:.0e} | {found:.3e} | {exact:.3e} | {error:+.1%} |")
        good &= ours <= oracle or not has_native_bf16()
        print(f"\npredicted and measured once: forward_ad {ours:.1f} s, fp32 {oracle:.1f} s")
    if args.check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
