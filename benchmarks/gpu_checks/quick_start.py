"""The quick start: in each precision, again with the same seed, and resumed."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from gpu_checks.models import PRECISIONS
from logra_lightning import (
    KLBudget,
    PolicyModule,
    RelativeRowAdam,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.callbacks import StepCheckpoint
from logra_lightning.data import TokenizedDataModule
from logra_lightning.engines import Engine
from logra_lightning.engines.weights import checksum
from logra_lightning.rewards import exact_match

TINY = str(Path(__file__).parents[2] / "examples" / "tiny_policy")


def trainer(
    report: Any, steps: int, precision: Any, callbacks: Sequence[Any], **options: Any
) -> Any:
    return Trainer(
        accelerator="gpu" if report.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        callbacks=list(callbacks),
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=any(isinstance(c, StepCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class Record(Callback):
    """All that is logged at each step but times."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.seconds: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seconds = {name: v for name, v in logged.items() if name.startswith("time/")}
        kept = {name: v for name, v in logged.items() if name not in self.seconds}
        self.steps[trainer.global_step] = kept


class Sums(TokenizedDataModule):
    """Problems as the tiny policy knows them."""

    def load_rows(self) -> Any:
        draw, rows = random.Random(0), []
        for _ in range(640):
            x, y, z = (draw.randrange(10) for _ in range(3))
            text = f"State the final answer to the following arithmetic problem: {x} + {y} - {z} ="
            rows.append({"prompt": text, "answer": str(x + y - z)})
        return rows, []


def quick_start(report: Any, precision: str, engine: Engine, callbacks: Sequence[Any], steps: int,
                ckpt_path: str | None = None) -> tuple[Record, dict[str, Any]]:  # fmt: skip
    """A run of the quick start; what it logged, and its weights."""
    module = PolicyModule(
        TINY,
        [Reward(exact_match)],
        sampling=SamplingParams(max_tokens=6),
        engine=engine,
        optimizer=lambda *args: RelativeRowAdam(*args, update_ratio=0.002),
        seed=0,
    )
    record = Record()
    budget = KLBudget(0.02, 0.01, 60, bf16_every=0)
    run = trainer(
        report,
        steps,
        precision,
        [SketchAccumulation(), budget, *callbacks, record],
        strategy=SketchStrategy(rank=32 if report.quick else 128),
    )
    data = Sums(TINY, prompts_per_step=8 if report.quick else 64, seed=0)
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return record, {name: w.detach().clone() for name, w in module.state_dict().items()}


def quickstart(report: Any) -> None:
    """The quick start in each precision: 6 steps, again, and from the checkpoint at step 3."""
    for precision in ("32-true", "bf16-true") if report.quick else PRECISIONS:
        with report.part(precision), tempfile.TemporaryDirectory() as folder:
            every = 2 if report.quick else 3
            save = StepCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=-1)
            engines = [TorchEngine() for _ in range(3)]
            first, ends = quick_start(report, precision, engines[0], [save], 2 * every)
            again, twice = quick_start(report, precision, engines[1], [], 2 * every)
            saved = f"{folder}/step={every}.ckpt"
            resumed, later = quick_start(report, precision, engines[2], [], 2 * every, saved)
            found = {
                "again": differences(first, again, ends, twice),
                "resumed": differences(first, resumed, ends, later),
                "step_s": first.seconds["time/step_s"],
                "kl/ratio": first.steps[2 * every]["kl/ratio"],
            }
            report.figures[precision] = found
            for name in ("again", "resumed"):  # exact on a CPU; attention on a GPU is not
                exact = found[name] == "equal" or report.device.type == "cuda"
                report.need(exact, f"{precision}, {name}: {found[name]}")
            for name, weight in ends.items():
                one, other = checksum(weight), checksum(weight.cpu())
                report.need(one == other, f"the checksum of {name} depends on the device")


def differences(one: Record, other: Record, ends: Any, others: Any) -> Any:
    """`equal`, or what first differs between two runs and by how much."""
    found: dict[str, Any] = {}
    for step, logged in other.steps.items():
        for name, value in logged.items():
            before = one.steps[step].get(name, math.nan)
            if value != before and not (math.isnan(value) and math.isnan(before)):
                found.setdefault("first", f"{name} at step {step}: {before} and {value}")
                if name == "loss/policy":
                    found["loss"] = max(found.get("loss", 0.0), abs(value - before))
    moved = [n for n, w in ends.items() if not torch.equal(w, others[n])]
    if moved:
        found["weights"] = len(moved)
        gaps = [(ends[n].double() - others[n].double()).abs().max().item() for n in moved]
        found["largest gap"] = max(gaps)
    return found or "equal"
