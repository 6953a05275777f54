"""ValidateAtEnds validates before the first step and after the last, once each."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from logra_lightning.callbacks import ValidateAtEnds


class Steps(Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []
        self.trained: list[int] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.trained.append(trainer.global_step)


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (3, 100, [0, 3])],
)
def test_both_ends_are_validated(
    tmp_path: Path, steps: int, every: int, expected: list[int]
) -> None:
    seen = Steps()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[ValidateAtEnds(), seen],
        max_steps=steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    assert seen.validated == expected
    assert seen.trained == list(range(1, steps + 1))
