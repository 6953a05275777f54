"""Gradient sketches against dense AdamW on the quick start's task, with equal rollouts.

    python benchmarks/sketch_vs_dense.py

Each run is the quick start with another seed of its completions and of the order of its prompts.
The two kinds of run take turns. `--check` fails when sketches end more than 3 points below.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = {"sketches": [], "dense AdamW": ["--trainer.strategy=auto"]}


def measure(arguments: list[str], seed: int, steps: int) -> dict[str, float]:
    """Success before and after, and seconds per step, from the last lines of one run."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "logra_lightning", "fit"]
        command += ["--config", "configs/quickstart.yaml", f"--trainer.max_steps={steps}"]
        command += [f"--model.seed={seed}", f"--data.init_args.seed={10_000_000 * (seed + 1)}"]
        command += [f"--trainer.logger.init_args.save_dir={runs}", *arguments]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    success = re.search(r"eval/pass@1: (\S+) at step 0, (\S+) at step", done.stdout)
    seconds = re.search(r"seconds per step: (\S+)", done.stdout)
    assert success
    assert seconds
    before, after = map(float, success.groups())
    return {"before": before, "after": after, "step_s": float(seconds.group(1))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Sketches against dense AdamW.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps = 1, 20

    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind, arguments in KINDS.items():
            runs[kind].append(measure(arguments, seed, args.steps))
    print(f"| {args.steps} steps | success before | after, by seed | median s per step |")
    print("|---|---|---|---|")
    for kind, results in runs.items():
        after = ", ".join(f"{result['after']:.3f}" for result in results)
        seconds = statistics.median(result["step_s"] for result in results)
        print(f"| {kind} | {results[0]['before']:.3f} | {after} | {seconds:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2))
    worst = min(
        ours["after"] - theirs["after"]
        for ours, theirs in zip(runs["sketches"], runs["dense AdamW"], strict=True)
    )
    print(f"largest shortfall of sketches: {max(0.0, -worst):.3f} (target: at most 0.030)")
    if args.check and worst < -0.03:
        sys.exit(1)


if __name__ == "__main__":
    main()
