"""A run of the shipped policy in processes of its own, for tests to disturb.

`python -m tests.faults.fault_run FOLDER [--steps N] [--strategy S] [--devices N] [--pause S]`
prints `batch N` when a batch begins and saves a checkpoint after each; started again, it goes on
from the last checkpoint. At the end it writes `FOLDER/end.pt`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from logra_lightning import KLBudget, Reward, SketchAccumulation
from logra_lightning.callbacks import Preemption, StepCheckpoint
from tests.runs import data, digits, policy, trainer, weights
from tests.split_runs import STRATEGIES
from tests.warm import Program, Warm


class Announce(Callback):
    """Says which batch begins, and waits in the middle of it for so many seconds."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            print(f"batch {trainer.global_step}", flush=True)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        time.sleep(self.pause)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--strategy", default="sketch")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mine = args.folder / f"process{os.environ.get('LOCAL_RANK', 0)}"
    mine.mkdir(parents=True, exist_ok=True)
    saves = StepCheckpoint(dirpath=args.folder / "saved", every_n_train_steps=1)
    strategy = STRATEGIES[args.strategy](rank=32)
    module = policy(rewards=[Reward(digits)], train_others=True)
    made = trainer(
        mine,
        args.steps,
        strategy=strategy,
        devices=args.devices,
        enable_checkpointing=True,
        callbacks=[Preemption(), SketchAccumulation(), KLBudget(), saves, Announce(args.pause)],
    )
    made.fit(module, datamodule=data(mine), ckpt_path="last")
    found = weights(module), made.optimizers[0].state_dict()
    if made.is_global_zero:
        torch.save(found, args.folder / "end.pt")


def begin(warm: Warm, folder: Path, *options: str) -> Program:
    """Start a run in a folder, which it shares with those before it."""
    folder.mkdir(exist_ok=True)
    output = folder / f"output{len(list(folder.glob('output*')))}.txt"
    return warm.begin("tests.faults.fault_run", str(folder), *options, output=output)


def children(pid: int) -> list[int]:
    """The processes that a process started and that still live."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(child) for child in found.stdout.split()]


def is_gone(pid: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    for _ in range(int(seconds * 10)):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


if __name__ == "__main__":
    main()
