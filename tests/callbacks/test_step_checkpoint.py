"""The last checkpoint is that of the last step, also when no validation follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
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
