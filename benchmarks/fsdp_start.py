"""Measures the host memory of each process while `sketch_fsdp` loads a model.

    python benchmarks/fsdp_start.py

The rows `reads once` are ours: process 0 reads the weights and sends each process its rows. In the
rows `all read` each process loads the model itself, as a module does that calls `from_pretrained`
in its `configure_model`. Both are run in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from logra_lightning.distributed.processes import of_all_processes
from logra_lightning.policy.load import load_policy
from logra_lightning.strategy import SketchFSDPStrategy, load_policy_for

PROCESSES = 2
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WAYS = {"reads once": True, "all read": False}
HEADER = "| start | process | weights (MB) | before (MB) | peak (MB) | added (MB) |"


class Start(LightningModule):
    """Does nothing but load a model."""

    def __init__(self, path: str, once: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.path, self.once = path, once
        self.before = 0.0

    def configure_model(self) -> None:
        load_policy(str(Path(self.path) / "small"))  # imports what loading needs
        self.before = megabytes("VmHWM")
        if self.once:
            self.policy = load_policy_for(self.trainer.strategy, self.path)
        else:
            self.policy = load_policy(self.path)

    def predict_step(self, *_: Any) -> None:
        """Nothing; the model has been sharded by now."""


def megabytes(field: str) -> float:
    """A field of this process's memory, such as `VmHWM`, the largest it has had so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def measure(path: str, once: bool) -> None:
    """In each process: load the model; process 0 prints what all have measured."""
    torch.set_num_threads(1)
    module = Start(path, once)
    trainer = Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=SketchFSDPStrategy(rank=8),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.predict(module, DataLoader([0] * PROCESSES), return_predictions=False)
    found = of_all_processes((module.before, megabytes("VmHWM")))
    if trainer.is_global_zero:
        print("measured", json.dumps(found))


def make_model(folder: Path, sizes: dict[str, int]) -> float:
    """Save a random model; its weights in megabytes."""
    for path, options in ((folder, sizes), (folder / "small", SMALL)):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_attention_heads=8, **options))
        model.save_pretrained(path)
    size = LlamaForCausalLM.from_pretrained(folder).num_parameters()
    return size * 4 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], WAYS[args.measure[1]])
        return
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = make_model(Path(folder), SMALL if args.quick else LARGE)
        for way in WAYS:
            command = [sys.executable, __file__, "--measure", folder, way]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ)
            )
            line = next(row for row in done.stdout.splitlines() if row.startswith("measured"))
            for process, (before, peak) in enumerate(json.loads(line.removeprefix("measured"))):
                rows.append([way, process, weights, before, peak, peak - before])
    print(f"{HEADER}\n|---|---|---|---|---|---|")
    for way, process, *numbers in rows:
        print(f"| {way} | {process} | " + " | ".join(f"{number:.0f}" for number in numbers) + " |")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
