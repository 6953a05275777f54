"""The last checkpoint is that of the last step, also when no validation follows it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from logra_lightning.callbacks import StepCheckpoint
from logra_lightning.callbacks.preemption import PreemptedError
from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO, CheckpointNotWrittenError


@pytest.mark.parametrize(("steps", "validate_every"), [(5, 3), (6, 3), (2, 100)])
def test_last_checkpoint_is_of_the_last_step(
    tmp_path: Path, steps: int, validate_every: int
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepCheckpoint(dirpath=tmp_path)],
        max_steps=steps,
        val_check_interval=validate_every,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps


@pytest.mark.parametrize(
    ("error", "half_done", "ranks", "saved"),
    [
        (RuntimeError(), False, 1, True),
        (KeyboardInterrupt(), False, 1, True),
        (KeyboardInterrupt(), True, 1, False),
        (FloatingPointError(), False, 1, False),
        (CheckpointNotWrittenError(), False, 1, False),
        (RuntimeError(), False, 2, False),
        (PreemptedError(), False, 2, True),
    ],
)
def test_a_broken_state_is_not_saved_over_the_last_good_one(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, half_done: bool, ranks: int, saved: bool
) -> None:
    calls = []
    monkeypatch.setattr(ModelCheckpoint, "on_exception", lambda *_: calls.append(1))
    trainer: Any = SimpleNamespace(
        optimizers=[SimpleNamespace(is_committing=half_done)], world_size=ranks
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StepCheckpoint().on_exception(trainer, LightningModule(), error)
    assert bool(calls) == saved
    assert len(caught) == (not saved)


def run(
    tmp_path: Path, steps: int, ckpt_path: str | None = None, version: str | None = None
) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepCheckpoint(every_n_train_steps=1)],
        max_steps=steps,
        limit_val_batches=0,
        logger=CSVLogger(tmp_path, "runs", version),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint:UserWarning")
def test_last_is_found_where_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        run(tmp_path, 1, "last")
    run(tmp_path, 3)
    again = run(tmp_path, 5, "last")
    assert Path(again.ckpt_path).parts[-3:] == ("version_1", "checkpoints", "last.ckpt")
    assert again.global_step == 5
    assert isinstance(again.strategy.checkpoint_io, AtomicCheckpointIO)


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint:UserWarning")
def test_last_is_the_newest_one_when_a_kill_came_before_it_was_renewed(tmp_path: Path) -> None:
    run(tmp_path, 2)
    saved = tmp_path / "runs" / "version_0" / "checkpoints"
    older = (saved / "last.ckpt").read_bytes()
    (saved / "last.ckpt").unlink()
    assert Path(run(tmp_path, 3, "last").ckpt_path).name == "step=2.ckpt"
    (tmp_path / "runs" / "version_1" / "checkpoints" / "last.ckpt").write_bytes(older)
    os.utime(tmp_path / "runs" / "version_1" / "checkpoints" / "last.ckpt", (1, 1))
    assert Path(run(tmp_path, 4, "last").ckpt_path).name == "step=3.ckpt"


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_last_of_a_run_with_a_name_is_not_that_of_another(tmp_path: Path) -> None:
    run(tmp_path, 2, version="one")
    assert run(tmp_path, 1, "last", version="two").ckpt_path is None
    assert run(tmp_path, 3, "last", version="one").global_step == 3
