"""A monitor that nothing logs is refused once all that could log it has logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from logra_lightning.monitors import MonitorCheck


class Logs(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("rollout/reward", 1.0)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("eval/pass@1", 1.0)


class Steps(Callback):
    seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


def fit(*callbacks: Callback, val_batches: int = 1) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, MonitorCheck()],
        max_steps=6,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=val_batches,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Logs())


@pytest.mark.parametrize(
    ("val_batches", "monitor", "nearest", "steps"),
    [(1, "eval/pass", "'eval/pass@1'", 2), (0, "rollout/rewards", "'rollout/reward'", 1)],
)
def test_it_is_refused_at_the_first_validation_or_where_none_comes_after_the_first_batch(
    val_batches: int, monitor: str, nearest: str, steps: int
) -> None:
    count = Steps()
    message = f"EarlyStopping .* '{monitor}', which nothing logs: .* such as {nearest}$"
    with pytest.raises(ValueError, match=message):
        fit(EarlyStopping(monitor), count, val_batches=val_batches)
    assert count.seen == steps


def test_without_a_similar_name_all_are_listed() -> None:
    with pytest.raises(
        ValueError, match="'xyz', .* such as 'epoch', 'eval/pass@1', 'rollout/reward', 'step'$"
    ):
        fit(EarlyStopping("xyz"))


def test_early_stopping_is_strict_again_once_its_monitor_is_known(tmp_path: Any) -> None:
    strict, lenient = EarlyStopping("eval/pass@1", patience=9), EarlyStopping("x", strict=False)
    fit(strict, lenient, ModelCheckpoint(tmp_path, monitor="step", mode="max"))
    assert (strict.strict, lenient.strict) == (True, False)
