"""A KL budget against a fixed step scale and a cosine learning rate, on the quick start's task.

    python examples/compare_kl_control.py --output examples/figures/kl_control.png

Each rule runs at several step sizes with the same rollouts per step. Left: reward; right: measured
against predicted KL of the runs, with the diagonal. The runs without a budget are measured too, by
the same callback with a budget that never binds. Needs matplotlib.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
STEPS = 60
# The budget never binds, so that the scale stays what it is; it is measured all the same.
OPEN = ["--kl_budget.start=1e9", "--kl_budget.end=1e9", "--kl_budget.backtrack=false"]
OPEN += ["--kl_budget.max_scale=1"]
COSINE = "--model.lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR"
RATIOS = (0.0005, 0.002, 0.008)


def rules(steps: int) -> dict[str, list[list[str]]]:
    """Name of each rule to the arguments of its runs, from small to large steps."""
    ratios = [[f"--model.optimizer.init_args.update_ratio={ratio}"] for ratio in RATIOS]
    budgets = [
        [f"--kl_budget.start={start}", f"--kl_budget.end={start / 4}", "--kl_budget.max_scale=100"]
        for start in (0.005, 0.02, 0.08)
    ]
    cosine = [COSINE, f"--model.lr_scheduler.init_args.T_max={steps}"]
    return {
        "KL budget": budgets,
        "fixed scale": [[*OPEN, *ratio] for ratio in ratios],
        "cosine learning rate": [[*OPEN, *cosine, *ratio] for ratio in ratios],
    }


def run(arguments: list[str], steps: int) -> dict[str, list[float]]:
    """Logged values of one run, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "logra_lightning", "fit"]
        command += ["--config", "configs/quickstart.yaml", f"--trainer.max_steps={steps}"]
        command += ["--model.engine=logra_lightning.engines.TorchEngine"]
        command += [f"--trainer.logger.init_args.save_dir={folder}", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        events = EventAccumulator(f"{folder}/quickstart/version_0")
        events.Reload()
        names = ("rollout/reward", "kl/predicted", "kl/measured", "eval/pass@1")
        return {name: [event.value for event in events.Scalars(name)] for name in names}


def draw(results: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4), constrained_layout=True)
    for axis, (name, runs) in zip(axes, results.items(), strict=False):
        for values, size in zip(runs, ("small", "middle", "large"), strict=False):
            axis.plot(values["rollout/reward"], label=f"{size} steps")
            positive = [
                pair
                for pair in zip(values["kl/predicted"], values["kl/measured"], strict=True)
                if min(pair) > 0
            ]
            axes[3].scatter(
                *zip(*positive, strict=True), s=6, color=f"C{list(results).index(name)}"
            )
        axis.set(title=name, xlabel="step", ylabel="mean reward", ylim=(0, 1))
        axis.legend(loc="lower right")
    for color, name in enumerate(results):
        axes[3].scatter([], [], color=f"C{color}", label=name)
    low, high = axes[3].get_xlim()
    axes[3].set(xscale="log", yscale="log", title="KL of each step, nats per token")
    axes[3].set(xlabel="predicted", ylabel="measured")
    low, high = axes[3].get_xlim()
    axes[3].plot([low, high], [low, high], color="black", linewidth=0.8)
    axes[3].legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Three ways to choose the length of a step.")
    parser.add_argument("--output", type=Path, default=Path("kl_control.png"))
    parser.add_argument("--json", type=Path, help="write the values here")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    results: dict[str, list[dict[str, list[float]]]] = {}
    print("| rule | success after, small / middle / large steps |")
    print("|---|---|")
    for name, runs in rules(args.steps).items():
        results[name] = [run(arguments, args.steps) for arguments in runs]
        after = " / ".join(f"{values['eval/pass@1'][-1]:.3f}" for values in results[name])
        print(f"| {name} | {after} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results))
    draw(results, args.output)
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
