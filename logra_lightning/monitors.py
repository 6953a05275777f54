"""`MonitorCheck`: refuses callbacks whose `monitor` nothing logs, before anything is lost by it."""

from __future__ import annotations

import difflib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from logra_lightning.names import named


class MonitorCheck(Callback):
    """Checks the monitors of all callbacks once a batch and a validation have logged their metrics.

    That is at the first validation, or at the end of the first batch where validation came before
    it or never comes. `EarlyStopping` would end the run sooner where validation comes first and its
    metric is one of training, so it is not strict until then. A callback that the user has set to
    `strict=False` is left alone.

    Raises:
        ValueError: nothing logs a monitor; says which metrics have a similar name.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._watching: list[Any] = []
        self._trained = self._validated = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the callbacks that have a monitor."""
        self._names = {"epoch", "step"}  # which `ModelCheckpoint` knows by itself
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._watching = [
            c for c in callbacks if getattr(c, "monitor", None) and getattr(c, "strict", True)
        ]
        self._set_strict(False)
        self._trained, self._validated = False, not _validates(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Check after the first batch, if it has validated before."""
        if not self._trained:
            self._trained = True
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check after the first validation, if a batch came before it."""
        if not trainer.sanity_checking and not self._validated:
            self._validated = True
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        self._names |= set(trainer.callback_metrics)
        if not (self._trained and self._validated):
            return
        self._set_strict(True)
        for callback in self._watching:
            if callback.monitor not in self._names:
                raise ValueError(
                    f"{type(callback).__name__} in trainer.callbacks has the monitor "
                    f"{callback.monitor!r}, which nothing logs: set it to a metric that there is, "
                    f"such as {_nearest(callback.monitor, self._names)}"
                )

    def _set_strict(self, strict: bool) -> None:
        for callback in self._watching:
            if hasattr(callback, "strict"):
                callback.strict = strict


def _validates(trainer: Trainer) -> bool:
    """Whether a fit has a validation at all."""
    batches = trainer.num_val_batches
    return (
        trainer.enable_validation and sum(batches if isinstance(batches, list) else [batches]) > 0
    )


def _nearest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return named(close or sorted(names), limit=12)
