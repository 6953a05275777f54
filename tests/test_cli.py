"""Runs on the command line, in this process: what they write, say and refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
