"""How well the KL of a step is predicted, whether its budget holds, and what the probe costs.

    python benchmarks/kl_probe.py                      # the quick start
    python benchmarks/kl_probe.py --run runs/smollm2_larger_number/version_0

One row per run, from its TensorBoard logs. Without `--run` the quick start is trained first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
RATIO = (0.7, 1.4)  # the median of measured over predicted
TOLERANCE = 2.0  # times the budget, which no accepted update exceeds
SHARE = 0.10  # of the step


def quick_start(folder: str, steps: int) -> Path:
    command = [sys.executable, "-m", "logra_lightning", "fit"]
    command += ["--config", "configs/quickstart.yaml", f"--trainer.max_steps={steps}"]
    command += [f"--trainer.logger.init_args.save_dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Path(folder) / "quickstart" / "version_0"


def figures(run: Path) -> dict[str, float]:
    """What one run's logs say."""
    events = EventAccumulator(str(run))
    events.Reload()
    names = ["kl/ratio", "kl/measured", "kl/budget", "kl/backtracks"]
    names += ["time/kl_s", "time/step_s", "optim/step_scale", "optim/rejected_steps"]
    steps: dict[str, dict[int, float]] = {
        name: {event.step: event.value for event in events.Scalars(name)} for name in names
    }
    accepted = [step for step, scale in steps["optim/step_scale"].items() if scale > 0]
    ratios = [steps["kl/ratio"][step] for step in accepted]
    over = [steps["kl/measured"][step] / steps["kl/budget"][step] for step in accepted]
    share = [seconds / steps["time/step_s"][step] for step, seconds in steps["time/kl_s"].items()]
    return {
        "steps": len(steps["optim/step_scale"]),
        "ratio": statistics.median(ratios),
        "over": max(over),
        "backtracks": sum(steps["kl/backtracks"].values()),
        "rejected": max(steps["optim/rejected_steps"].values()),
        "probe_s": statistics.median(steps["time/kl_s"].values()),
        "share": statistics.median(share),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The KL probe: accuracy, budget and cost.")
    parser.add_argument("--run", type=Path, action="append", help="folder of TensorBoard logs")
    parser.add_argument("--quick", action="store_true", help="20 steps of the quick start")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        runs = args.run or [quick_start(folder, 20 if args.quick else 60)]
        results = {str(run) if args.run else "quickstart": figures(run) for run in runs}
    print(
        "| run | steps | measured/predicted, median | largest accepted/budget | backtracks |",
        end="",
    )
    print(" rejected | probe, s | of the step |")
    print("|---|---|---|---|---|---|---|---|")
    for name, x in results.items():
        print(
            f"| {name} | {x['steps']:.0f} | {x['ratio']:.2f} | {x['over']:.2f} | "
            f"{x['backtracks']:.0f} | {x['rejected']:.0f} | {x['probe_s']:.3f} | {x['share']:.1%} |"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    good = all(
        RATIO[0] <= x["ratio"] <= RATIO[1] and x["over"] <= TOLERANCE and x["share"] <= SHARE
        for x in results.values()
    )
    if args.check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
