"""Sketches against dense AdamW on a real model: SmolLM2-135M learns which number is larger.

    python benchmarks/smollm2_vs_dense.py --model FOLDER --plot examples/figures/smollm2.png

Three seeds of sketches under a KL budget, and dense AdamW on the same matrices at three learning
rates, all with equal rollouts per step. FOLDER is what `python examples/fetch_smollm2.py` prints.
Runs that are already in `--runs` are read, not made again. Needs matplotlib for `--plot`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
TARGET = 0.85  # mean success of the sketches
DENSE = ["--trainer.strategy=auto", "--trainer.precision=bf16-mixed", "--weight_sync.mode=dense"]
DENSE += ["--model.engine.init_args.dtype=bfloat16"]
LEARNING_RATES = ("1.0e-5", "3.0e-5", "1.0e-4")


def all_runs(seeds: int) -> dict[str, list[str]]:
    """Name of each run to its arguments."""
    runs = {
        f"sketch_{seed}": [
            "--trainer.precision=bf16-true",
            f"--model.seed={seed}",
            f"--data.init_args.seed={seed}",
        ]
        for seed in range(seeds)
    }
    return runs | {f"dense_{lr}": [*DENSE, f"--model.adamw.lr={lr}"] for lr in LEARNING_RATES}


def train(name: str, arguments: list[str], model: str, folder: Path, steps: int) -> None:
    command = [sys.executable, "-m", "logra_lightning", "fit"]
    command += ["--config", "configs/smollm2_larger_number_cpu.yaml", f"--model.model={model}"]
    command += [f"--trainer.logger.init_args.save_dir={folder.resolve()}"]
    command += [f"--trainer.logger.init_args.name={name}", f"--trainer.max_steps={steps}"]
    command += ["--trainer.enable_checkpointing=false", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def read(folder: Path, steps: int) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder / "version_0"))
    events.Reload()
    present = events.Tags()["scalars"]
    values = {name: [event.value for event in events.Scalars(name)] for name in present}
    if len(values.get("rollout/reward", [])) != steps or len(values["eval/pass@1"]) < 2:
        sys.exit(f"error: the run in {folder} did not make {steps} steps: remove it")
    return values


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, values in results.items():
        style = {"color": "C0"} if name.startswith("sketch") else {"linestyle": "--"}
        left.plot(values["rollout/reward"], label=name.replace("_", " "), **style)
        if "kl/measured" in values:
            right.plot(values["kl/measured"], color="C0", alpha=0.6)
            right.plot(values["kl/predicted"], color="C1", alpha=0.6)
            right.plot(values["kl/budget"], color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel="mean reward of the rollouts", ylim=(0, 1))
    left.legend(loc="lower right", fontsize=8)
    right.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    for color, label in (("C0", "measured KL"), ("C1", "predicted KL"), ("black", "budget")):
        right.plot([], [], color=color, label=label)
    right.legend(loc="upper right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sketches against dense AdamW on SmolLM2-135M.")
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"), help="folder of logs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps")
    parser.add_argument("--json", type=Path, help="write the logged values here")
    parser.add_argument("--check", action="store_true", help="exit 1 below the target")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.runs = 1, 2, args.runs / "quick"

    results = {}
    print("| run | success before | after | s per step, median | minutes |")
    print("|---|---|---|---|---|")
    for name, arguments in all_runs(args.seeds).items():
        if not (args.runs / name).is_dir():
            train(name, arguments, args.model, args.runs, args.steps)
        values = results[name] = read(args.runs / name, args.steps)
        seconds = sorted(values["time/step_s"])
        before, after = values["eval/pass@1"][0], values["eval/pass@1"][-1]
        middle, minutes = seconds[len(seconds) // 2], sum(seconds) / 60
        print(f"| {name} | {before:.3f} | {after:.3f} | {middle:.1f} | {minutes:.1f} |", flush=True)
    if args.plot:
        draw(results, args.plot)
    if args.json:
        args.json.write_text(json.dumps(results))
    after = [x["eval/pass@1"][-1] for name, x in results.items() if name.startswith("sketch")]
    if args.check and sum(after) / len(after) < TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
