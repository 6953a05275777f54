"""SketchAccumulation does nothing without sketches, and says so; it refuses nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from logra_lightning.callbacks import SketchAccumulation


def test_without_sketches_it_is_inactive_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[SketchAccumulation()],
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with caplog.at_level("INFO"):
        trainer.fit(BoringModel())
    said = [r for r in caplog.records if "SketchAccumulation is inactive" in r.getMessage()]
    assert len(said) == 1
    assert not any(name.startswith(("sketch/", "optim/")) for name in trainer.logged_metrics)
    assert torch.is_grad_enabled()


def test_refresh_every_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="refresh_every must be at least 1, got 0"):
        SketchAccumulation(refresh_every=0)
