"""The last checkpoint is that of the last step, also when no validation follows it."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from logra_lightning.callbacks import StepCheckpoint


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
    ("error", "half_done", "saved"),
    [
        (RuntimeError(), False, True),
        (KeyboardInterrupt(), False, True),
        (KeyboardInterrupt(), True, False),
        (FloatingPointError(), False, False),
    ],
)
def test_a_broken_state_is_not_saved_over_the_last_good_one(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, half_done: bool, saved: bool
) -> None:
    calls = []
    monkeypatch.setattr(ModelCheckpoint, "on_exception", lambda *_: calls.append(1))
    trainer: Any = SimpleNamespace(optimizers=[SimpleNamespace(is_committing=half_done)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StepCheckpoint().on_exception(trainer, LightningModule(), error)
    assert bool(calls) == saved
    assert len(caught) == (not saved)
