"""A run that is stopped leaves one whole checkpoint, whatever its checkpoint callbacks."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from logra_lightning.callbacks import Preemption, StepCheckpoint
from logra_lightning.checkpoints.newest import checkpoints_of_runs, newest

# Lightning's own, about folders, loaders and callbacks of these runs.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class Stop(Callback):
    """Sends SIGTERM when a batch begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(
    folder: Path, *callbacks: Callback, step: int = 3, ckpt_path: str | None = None, **options: Any
) -> tuple[str, Trainer]:
    """What a run that SIGTERM stops says about it, and its trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "callbacks": [Preemption(), *callbacks, Stop(step)],
        "max_steps": 9,
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": CSVLogger(folder, "runs"),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = Trainer(**defaults | options)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        with pytest.raises(SystemExit) as stop:
            trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    finally:
        logger.removeHandler(handler)
    assert stop.value.code == 143
    (line,) = [text for text in said if text.startswith("SIGTERM")]
    return line, trainer


KINDS: dict[str, Any] = {
    "step": lambda folder: [StepCheckpoint()],
    "best": lambda folder: [EarlyStopping("x"), ModelCheckpoint(monitor="x", save_top_k=3)],
    "last": lambda folder: [ModelCheckpoint(save_last=True)],
    "weights": lambda folder: [ModelCheckpoint(save_weights_only=True, every_n_train_steps=1)],
    "folder": lambda folder: [ModelCheckpoint(dirpath=folder / "mine")],
    "exception": lambda folder: [OnExceptionCheckpoint(folder / "mine")],
    "Lightning's default": lambda folder: [],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_leaves_a_checkpoint_and_goes_on_from_it(tmp_path: Path, kind: str) -> None:
    line, trainer = stopped(tmp_path, *KINDS[kind](tmp_path))
    path = newest(checkpoints_of_runs(trainer))
    assert line == (
        f"SIGTERM: the run ends with exit code 143; its checkpoint is {path}; go on with "
        f"ckpt_path=last."
    )
    assert torch.load(path, weights_only=True)["global_step"] == 3
    # Stopped before it makes a step, the next run still leaves one.
    line, trainer = stopped(tmp_path, *KINDS[kind](tmp_path), ckpt_path=path)
    again = newest(checkpoints_of_runs(trainer))
    assert again in line
    assert torch.load(again, weights_only=True)["global_step"] == 3


def test_a_resumed_run_renews_its_file_and_leaves_that_of_another(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "last.ckpt").write_bytes(b"of another run")
    path = None
    for step in (2, 4):
        saves = ModelCheckpoint(dirpath=folder, monitor="x")
        line, _ = stopped(tmp_path, saves, step=step, ckpt_path=path)
        path = str(folder / "last-v1.ckpt")
        assert path in line
        assert torch.load(path, weights_only=True)["global_step"] == step
    assert sorted(file.name for file in folder.iterdir()) == ["last-v1.ckpt", "last.ckpt"]
    assert (folder / "last.ckpt").read_bytes() == b"of another run"


@pytest.mark.parametrize(
    ("options", "step", "reason"),
    [
        ({"enable_checkpointing": False}, 3, "trainer.enable_checkpointing is false"),
        ({}, 0, "no step has been made yet"),
        ({"fast_dev_run": 5}, 3, "trainer.fast_dev_run saves none"),
    ],
)
def test_a_save_that_does_not_happen_is_not_announced(
    tmp_path: Path, options: dict[str, Any], step: int, reason: str
) -> None:
    line, _ = stopped(tmp_path, step=step, **options)
    assert line == (
        f"SIGTERM: the run ends with exit code 143; without a checkpoint, since {reason}."
    )
    assert not list(tmp_path.rglob("*.ckpt"))
