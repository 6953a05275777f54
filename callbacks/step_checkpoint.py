"""`StepCheckpoint`: a `ModelCheckpoint` that always saves the last step, as `last.ckpt`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from logra_lightning.callbacks.preemption import PreemptedError
from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO, CheckpointNotWrittenError


class StepCheckpoint(ModelCheckpoint):
    """Saves a checkpoint after each validation and after the last step.

    Lightning's own `ModelCheckpoint` does not save the steps after the last validation. With
    `ckpt_path=last` a run goes on from its newest checkpoint, whatever the file is called, also
    where the logger has put it into a numbered folder (`version_3`).

    Args:
        filename: name of a checkpoint's file; `{step}`, and names of metrics in braces, are
            replaced by their values.
        save_last: whether to keep a copy of the newest checkpoint as `last.ckpt`.
        save_on_exception: whether to save also when the run is interrupted or fails. Nothing is
            saved in the middle of an update, after numbers that are not finite, or when one of
            several processes fails.
        options: options of `ModelCheckpoint`, for instance `monitor: eval/pass@1` and `mode: max`.
    """

    def __init__(
        self,
        filename: str | None = "{step}",
        save_last: bool = True,
        save_on_exception: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            filename=filename, save_last=save_last, save_on_exception=save_on_exception, **options
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a strategy of Lightning's
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            # Each version of a run has a folder of its own, so after a resume this is no news.
            warnings.filterwarnings("ignore", "The dirpath has changed")
            super().load_state_dict(state_dict)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        reason = _why_not_saved(trainer, exception)
        if reason:
            rank_zero_warn(f"no checkpoint is saved {reason}: the last one stays")
            return
        super().on_exception(trainer, pl_module, exception)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """All checkpoints of the run: after a kill, `last.ckpt` may not be the newest."""
        if "://" in str(self.dirpath or trainer.default_root_dir):
            return super()._find_last_checkpoints(trainer)
        if self.dirpath is not None:
            return _checkpoints(Path(self.dirpath))
        if not trainer.loggers:
            return _checkpoints(Path(trainer.default_root_dir) / "checkpoints")
        logger = trainer.loggers[0]
        runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
        version = logger.version
        if isinstance(version, str):
            return _checkpoints(runs / version / "checkpoints")
        found = _checkpoints(runs / f"version_{version}" / "checkpoints")
        return found or _checkpoints(runs, "version_*/checkpoints/*.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def _checkpoints(folder: Path, pattern: str = "*.ckpt") -> set[str]:
    return {str(path) for path in folder.glob(pattern)}


def _why_not_saved(trainer: Trainer, exception: BaseException) -> str:
    """Why no checkpoint of the present state should be saved; empty where one should."""
    if any(getattr(optimizer, "is_committing", False) for optimizer in trainer.optimizers):
        return "of this state, in the middle of an update"
    if isinstance(exception, FloatingPointError):
        return "of this state, which is not finite"
    if isinstance(exception, CheckpointNotWrittenError):
        return "again"
    if trainer.world_size > 1 and not isinstance(exception, PreemptedError):
        return "by one process without the others"
    return ""
