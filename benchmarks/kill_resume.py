"""Kills runs at random moments, resumes them, and compares them with a run that nobody killed.

    python benchmarks/kill_resume.py             # 100 kills
    python benchmarks/kill_resume.py --quick     # a few

Runs of the shipped policy save a checkpoint after every step and go on from the last one
(`ckpt_path="last"`). Every second kill (-9) waits for a checkpoint that is being written, the
others come at a random time, while the model is loaded too. Half the runs are in fp32, half in
bf16-true. In the end weights and the state of the optimizer must be those of the undisturbed run,
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from rich.progress import Progress

import logra_lightning.data.prompts
import logra_lightning.engines.torch_engine  # noqa: F401  (imported once, for all that are forked)
from logra_lightning import (
    AdamWOptions,
    KLBudget,
    PolicyModule,
    PromptDataModule,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.callbacks import StepCheckpoint
from logra_lightning.checkpoints.checkpoint_io import read_checkpoint

POLICY = Path(__file__).parent.parent / "examples" / "tiny_policy"
STEPS = 6
PRECISIONS = ("32-true", "bf16-true")


@dataclass
class Counts:
    """What happened to the runs of one precision."""

    runs: int = 0
    kills: int = 0
    while_saving: int = 0
    lost_steps: int = 0
    not_resumed: int = 0
    mismatches: int = 0


class Start(Callback):
    """Notes at which step a run goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        (self.folder / "start").write_text(str(trainer.global_step))


def digits(completion: str) -> float:
    return float(sum(int(c) for c in completion if c.isdigit()))


def train(folder: Path, data: Path, precision: Any) -> None:
    """A run to its end, which is written to `end.pt`."""
    torch.set_num_threads(1)  # renews a pool that forks break; threads that load would race for it
    with (folder / "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        module = PolicyModule(
            str(POLICY),
            [Reward(digits)],
            group_size=4,
            sampling=SamplingParams(max_tokens=6),
            engine=TorchEngine(),
            train_others=True,
            adamw=AdamWOptions(lr=1e-3),
        )
        saves = StepCheckpoint(dirpath=folder / "saved", every_n_train_steps=1)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision=precision,
            strategy=SketchStrategy(rank=32),
            callbacks=[Start(folder), SketchAccumulation(), KLBudget(), saves],
            max_steps=STEPS,
            max_epochs=-1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        prompts = PromptDataModule(str(data), str(POLICY), prompts_per_step=4, val_size=8)
        trainer.fit(module, datamodule=prompts, ckpt_path="last")
        end = module.state_dict(), trainer.optimizers[0].state_dict()
        torch.save(end, folder / "end.partial")
        (folder / "end.partial").rename(folder / "end.pt")


def begin(folder: Path, data: Path, precision: str) -> Any:
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=train, args=(folder, data, precision)
    )
    process.start()
    return process


def kill(process: Any, folder: Path, seconds: float, *, in_save: bool) -> bool:
    """Kill after so many seconds, or then in the next save; whether a save was under way."""
    process.join(seconds)
    while in_save and process.is_alive() and not partial(folder):
        pass
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return partial(folder)


def partial(folder: Path) -> bool:
    saved = folder / "saved"
    return saved.is_dir() and any(name.endswith(".partial") for name in os.listdir(saved))


def newest_step(folder: Path) -> int:
    """Steps behind the newest checkpoint that can be read."""
    found = [0]
    for path in (folder / "saved").glob("*.ckpt"):
        found.append(read_checkpoint(path)["global_step"])
    return max(found)


def same(first: Path, second: Path) -> bool:
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    return equal(a[0], b[0]) and equal(a[1]["state"], b[1]["state"])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a.dtype == b.dtype and torch.equal(a, b)


def disturbed(folder: Path, data: Path, precision: str, draw: random.Random, counts: Counts,
              longest: float, kills: int) -> None:  # fmt: skip
    """One run, killed up to `kills` times, until it ends."""
    counts.runs += 1
    while True:
        saved = newest_step(folder)
        (folder / "start").unlink(missing_ok=True)
        process = begin(folder, data, precision)
        if kills:
            seconds, in_save = draw.uniform(0, longest), draw.random() < 0.5
            counts.while_saving += kill(process, folder, seconds, in_save=in_save)
        process.join()
        if (folder / "start").exists() and (text := (folder / "start").read_text()):
            counts.lost_steps += max(0, saved - int(text))
        if process.exitcode == 0:
            return
        if process.exitcode != -signal.SIGKILL:
            counts.not_resumed += 1
            print((folder / "log").read_text()[-2000:], file=sys.stderr)
            return
        counts.kills, kills = counts.kills + 1, kills - 1


def write_sums(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(24):
            x, y, z = (draw.randrange(10) for _ in range(3))
            prompt = (
                f"State the final answer to the following arithmetic problem: {x} + {y} - {z} ="
            )
            file.write(json.dumps({"prompt": prompt, "answer": str(x + y - z)}) + "\n")


def measure(kills: int, seed: int, minutes: float, folder: Path) -> dict[str, Counts]:
    data, draw = folder / "sums.jsonl", random.Random(seed)
    write_sums(data)
    counts = {precision: Counts() for precision in PRECISIONS}
    longest = {}
    for precision in PRECISIONS:
        start = time.perf_counter()
        process = begin(folder / precision, data, precision)
        process.join()
        if process.exitcode != 0:
            sys.exit((folder / precision / "log").read_text())
        longest[precision] = time.perf_counter() - start
    deadline, run = time.monotonic() + 60 * minutes, 0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("kills", total=kills)
        while (done := sum(c.kills for c in counts.values())) < kills:
            if time.monotonic() > deadline:
                break
            precision = PRECISIONS[run % len(PRECISIONS)]
            mine, own, run = folder / f"run{run}", counts[precision], run + 1
            mine.mkdir()
            few = min(kills - done, 12)
            disturbed(mine, data, precision, draw, own, longest[precision], few)
            if (mine / "end.pt").exists():
                own.mismatches += not same(mine / "end.pt", folder / precision / "end.pt")
            progress.update(bar, completed=sum(c.kills for c in counts.values()))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills runs, resumes them, compares the ends.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run after so many")
    parser.add_argument("--quick", action="store_true", help="8 kills")
    parser.add_argument("--check", action="store_true", help="exit 1 where anything is lost")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kills = 8 if args.quick else args.kills
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        counts = measure(kills, args.seed, args.minutes, Path(folder))
    print(
        "| precision | runs | kills (-9) | while saving | lost steps | not resumed | mismatches |"
    )
    print("|---|---|---|---|---|---|---|")
    for precision, c in counts.items():
        print(f"| {precision} | " + " | ".join(map(str, asdict(c).values())) + " |")
    total = sum(c.kills for c in counts.values())
    lost = sum(c.lost_steps + c.not_resumed for c in counts.values())
    mismatches = sum(c.mismatches for c in counts.values())
    seconds = time.perf_counter() - start
    print(f"\n{total} kills in {seconds:.0f} s: {lost} lost, {mismatches} mismatches")
    if args.json:
        Path(args.json).write_text(json.dumps({p: asdict(c) for p, c in counts.items()}))
    if args.check and (lost or mismatches or total < kills):
        sys.exit(1)


if __name__ == "__main__":
    main()
