"""`save_now`: saves the state of a run that is about to end, whatever its checkpoint callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from logra_lightning.checkpoints.newest import run_folder


def save_now(trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> str:
    """Save a whole checkpoint of the present state, unless there is one; return its path.

    Callbacks that save on an exception do it. Where none does, `last.ckpt` is written to the folder
    of the run's first `ModelCheckpoint`, or `last-v1.ckpt` and so on beside one of another run.
    Every process must call it.

    Args:
        trainer: of the run; it has checkpoint callbacks.
        pl_module: the module that trains.
        exception: why the run ends.
    """
    callbacks: list[Any] = trainer.checkpoint_callbacks
    savers = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
    for callback in callbacks:
        if getattr(callback, "save_on_exception", False):
            callback.on_exception(trainer, pl_module, exception)  # nothing when called again
        elif isinstance(callback, OnExceptionCheckpoint):
            return callback.ckpt_path  # saved in its turn
    for callback in savers:
        if is_saved(trainer, callback) and not callback.save_weights_only:
            return callback._last_checkpoint_saved
    saver = savers[0] if savers else ModelCheckpoint(dirpath=run_folder(trainer))
    # In its state, so that the resumed run writes the same file again.
    saver.last_model_path = saver.last_model_path or _free_path(trainer, saver)
    trainer.save_checkpoint(saver.last_model_path)
    return saver.last_model_path


def is_saved(trainer: Trainer, callback: ModelCheckpoint) -> bool:
    """Whether a callback has saved the present step."""
    saved = callback._last_checkpoint_saved
    return bool(saved) and callback._last_global_step_saved == trainer.global_step


def _free_path(trainer: Trainer, saver: ModelCheckpoint) -> str:
    names = saver.CHECKPOINT_NAME_LAST, saver.FILE_EXTENSION
    path, version = f"{saver.dirpath}/{''.join(names)}", 0
    while saver.file_exists(path, trainer):
        version += 1
        path = f"{saver.dirpath}/{names[0]}-v{version}{names[1]}"
    return path
