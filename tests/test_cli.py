"""Runs on the command line, in this process: what they write, say and refuse."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from logra_lightning.cli import main
from tests.conftest import TINY_POLICY, write_sums

pytestmark = [
    pytest.mark.usefixtures("private_datasets_cache"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # Lightning's own, about small runs
]

Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("fit", "--trainer.max_steps=1", callbacks=[...])` in the folder `here`."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    sums = write_sums(tmp_path / "sums.jsonl", 24)

    def run(subcommand: str, *options: str, **trainer: Any) -> None:
        config = {
            "model": {
                "model": str(TINY_POLICY),
                "rewards": [{"function": "logra_lightning.rewards.exact_match"}],
                "group_size": 4,
                "sampling": {"max_tokens": 4},
                "engine": {"class_path": "logra_lightning.engines.TorchEngine"},
            },
            "data": {
                "class_path": "logra_lightning.data.PromptDataModule",
                "init_args": {"path": sums, "prompts_per_step": 4, "val_size": 4},
            },
            "engine_check": {"enabled": False},
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "strategy": {
                    "class_path": "logra_lightning.strategy.SketchStrategy",
                    "init_args": {"rank": 8},
                },
                "max_steps": 1,
                "val_check_interval": 1,
                "check_val_every_n_epoch": None,
                "enable_progress_bar": False,
                **trainer,
            },
        }
        (tmp_path / "run.json").write_text(json.dumps(config))
        words = ["logra_lightning", subcommand, f"--config={tmp_path / 'run.json'}", *options]
        monkeypatch.setattr(sys, "argv", words)
        main()

    return run


def saver(**options: Any) -> dict[str, Any]:
    path = "lightning.pytorch.callbacks.ModelCheckpoint"
    return {"class_path": path, "init_args": options}


@pytest.mark.parametrize("callbacks", [[], [saver(save_last=True, every_n_train_steps=1)]])
def test_a_development_run_writes_nothing(
    run: Run, callbacks: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for subcommand in ("fit", "validate", "predict"):
        run(subcommand, "--trainer.fast_dev_run=1", callbacks=callbacks)
    assert list(Path.cwd().iterdir()) == []
    assert "checkpoint: none saved" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_checkpoint_that_is_not_there_is_one_line(run: Run, subcommand: str) -> None:
    with pytest.raises(SystemExit, match=r"^error: ckpt_path=best is known only within") as stop:
        run(subcommand, "--ckpt_path=best")
    assert "\n" not in str(stop.value)
    with pytest.raises(SystemExit, match=r"^error: there is no checkpoint 'nowhere.ckpt'"):
        run(subcommand, "--ckpt_path=nowhere.ckpt")


def test_a_finished_run_of_lightnings_own_callback_goes_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [saver(monitor="rollout/reward", save_top_k=1, every_n_train_steps=1)]
    run("fit", callbacks=callbacks)
    run("fit", "--ckpt_path=last", "--trainer.max_steps=2", callbacks=callbacks)
    assert "eval/pass@1: " in capsys.readouterr().out
    second = Path("runs/logra/version_1")
    steps = [json.loads(line)["step"] for line in (second / "rollouts.jsonl").open()]
    assert set(steps) == {2}


def test_a_stopped_run_with_callbacks_of_lightnings_own_loses_no_step(run: Run) -> None:
    monitored = {"monitor": "eval/pass@1", "mode": "max"}
    callbacks = [stopper(**monitored), saver(save_top_k=3, **monitored)]
    stop = {"class_path": "tests.callbacks.test_save_now.Stop", "init_args": {"step": 2}}
    often = ["--trainer.max_steps=3", "--trainer.val_check_interval=100"]
    with pytest.raises(SystemExit) as ended:
        run("fit", *often, callbacks=[*callbacks, stop])
    assert ended.value.code == 143
    run("fit", "--ckpt_path=last", *often, callbacks=callbacks)
    assert {row["step"] for row in rows("runs/logra/version_1/rollouts.jsonl")} == {3}


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).open()]


def completions(path: str) -> list[tuple[str, str]]:
    return [(row["prompt"], row["completion"]) for row in rows(path)]


def test_one_seed_is_that_of_rollouts_and_of_the_order_of_prompts(run: Run) -> None:
    off = ["--validate_at_ends.enabled=false", "--trainer.limit_val_batches=0"]
    for options in (
        ["--seed_everything=1"],
        ["--seed_everything=2", "--model.seed=1", "--data.init_args.seed=1"],
        ["--seed_everything=1", "--model.seed=0"],
        [],
        ["--model.seed=0", "--data.init_args.seed=0"],
    ):
        run("fit", *off, *options, enable_checkpointing=False)
    one, given, mixed, default, zero = (
        completions(f"runs/logra/version_{i}/rollouts.jsonl") for i in range(5)
    )
    assert one == given
    assert default == zero
    assert [p for p, _ in one] == [p for p, _ in mixed] != [p for p, _ in zero]
    assert [c for _, c in one] != [c for _, c in mixed]


def test_an_evaluation_is_logged_at_the_step_of_its_checkpoint(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("fit", "--trainer.max_steps=2")
    loggers = ["TensorBoardLogger", "CSVLogger"]
    logger = [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": name}}
        for name in loggers
    ]
    capsys.readouterr()
    run("validate", "--ckpt_path=runs", logger=logger)
    run("test", "--ckpt_path=runs", logger=logger)
    assert "validation at step 2\n" in capsys.readouterr().out
    for version, tag in enumerate(["eval/pass@1", "test/pass@1"]):
        (events,) = Path("TensorBoardLogger").glob(f"*/version_{version}")
        found = EventAccumulator(str(events))
        found.Reload()
        assert [event.step for event in found.Scalars(tag)] == [2]
        (table,) = Path("CSVLogger").glob(f"*/version_{version}/metrics.csv")
        (row,) = csv.DictReader(table.open())
        assert (row["step"], tag in row) == ("2", True)
    (files,) = Path("TensorBoardLogger").glob("*/version_0")
    assert (files / "eval_2.jsonl").exists()


def stopper(monitor: str, **options: Any) -> dict[str, Any]:
    path = "lightning.pytorch.callbacks.EarlyStopping"
    return {"class_path": path, "init_args": {"monitor": monitor, "patience": 9, **options}}


@pytest.mark.parametrize(
    "callback", [saver(monitor="eval/pass1"), stopper("eval/pass1"), stopper("rollout/rewards")]
)
@pytest.mark.parametrize("ends", ["true", "false"])
def test_a_monitor_that_nothing_logs_is_refused_at_once(
    run: Run, callback: dict[str, Any], ends: str
) -> None:
    name = callback["class_path"].rpartition(".")[2]
    monitor = callback["init_args"]["monitor"]
    nearest = {"eval/pass1": "'eval/pass@1'", "rollout/rewards": "'rollout/reward'"}[monitor]
    with pytest.raises(SystemExit) as stop:
        run(
            "fit",
            f"--validate_at_ends.enabled={ends}",
            "--trainer.max_steps=9",
            callbacks=[callback],
        )
    assert str(stop.value).startswith(
        f"error: {name} in trainer.callbacks has the monitor {monitor!r}, which nothing logs: set "
        f"it to a metric that there is, such as {nearest}"
    )
    assert {row["step"] for row in rows("runs/logra/version_0/rollouts.jsonl")} == {1}


@pytest.mark.parametrize("ends", ["true", "false"])
def test_monitors_of_training_and_of_validation_are_both_fine(run: Run, ends: str) -> None:
    monitors = ["rollout/reward", "eval/pass@1"]
    callbacks = [*(saver(monitor=m) for m in monitors), *(stopper(m) for m in monitors)]
    callbacks.append(stopper("nothing", strict=False))
    run("fit", f"--validate_at_ends.enabled={ends}", callbacks=callbacks)


def test_a_scheduler_that_needs_a_metric_is_refused_before_the_first_rollout(run: Run) -> None:
    scheduler = "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau"
    with pytest.raises(SystemExit, match=r"^error: model.lr_scheduler is ReduceLROnPlateau"):
        run("fit", scheduler, "--model.lr_scheduler.init_args.monitor=eval/pass@1")
    assert not list(Path.cwd().rglob("rollouts.jsonl"))
