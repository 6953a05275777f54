"""The last lines of a run say what it reached, how fast, and where everything is."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from logra_lightning.callbacks import RunSummary


def trainer(**given: Any) -> Any:
    defaults = {
        "sanity_checking": False,
        "callback_metrics": {},
        "callbacks": [],
        "checkpoint_callbacks": [],
        "loggers": [],
    }
    return SimpleNamespace(**defaults | given)


def validate(summary: RunSummary, step: int, value: float, **given: Any) -> None:
    metrics = {"eval/pass@1": torch.tensor(value)}
    now = trainer(callback_metrics=metrics, global_step=step, **given)
    summary.on_validation_end(now, None)  # type: ignore[arg-type]


def test_the_first_and_the_last_value_are_printed() -> None:
    summary = RunSummary()
    validate(summary, 0, 0.9, sanity_checking=True)
    validate(summary, 0, 0.125)
    assert summary.lines(trainer())[0] == "eval/pass@1: 0.125 at step 0"
    validate(summary, 50, 0.5)
    validate(summary, 100, 0.75)
    assert summary.lines(trainer())[0] == "eval/pass@1: 0.125 at step 0, 0.750 at step 100"


def test_the_time_of_a_step_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, clock = RunSummary(), iter([0.0, 1.0, 10.0, 12.5, 20.0, 120.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    for index in range(3):
        summary.on_train_batch_start(None, None, None, index)  # type: ignore[arg-type]
        summary.on_train_batch_end(None, None, None, None, index)  # type: ignore[arg-type]
    assert summary.lines(trainer())[0] == "seconds per step: 2.50 (median of 3)"


def test_files_and_what_other_callbacks_tell_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = trainer(
        callbacks=[SimpleNamespace(summary=lambda: "all is well"), SimpleNamespace()],
        checkpoint_callbacks=[SimpleNamespace(last_model_path=str(tmp_path / "x" / "last.ckpt"))],
        loggers=[TensorBoardLogger("logs", name="run", version=3)],
    )
    assert RunSummary().lines(ended) == [
        "all is well",
        "checkpoint: x/last.ckpt",
        "TensorBoard logs: logs/run/version_3",
        "watch them: tensorboard --logdir logs/run",
    ]
    assert RunSummary().lines(trainer()) == ["checkpoint: none saved"]


def test_the_checkpoint_is_the_newest_that_any_callback_saved(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("last.ckpt", "best.ckpt", "last-v1.ckpt")]
    for seconds, path in enumerate(paths):
        path.touch()
        os.utime(path, (seconds, seconds))
    old, best, new = map(str, paths)
    saved = [
        SimpleNamespace(last_model_path=old, best_model_path=best),
        SimpleNamespace(last_model_path="", _last_checkpoint_saved=new),
    ]
    (line,) = RunSummary().lines(trainer(checkpoint_callbacks=saved))
    assert line == f"checkpoint: {new}"
