"""`StepCheckpoint`: a `ModelCheckpoint` that always saves the last step, as `last.ckpt`."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from logra_lightning.callbacks.preemption import PreemptedError
from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO, CheckpointNotWrittenError
from logra_lightning.checkpoints.newest import checkpoints_like, is_remote


class StepCheckpoint(ModelCheckpoint):
    """Saves a checkpoint after each validation and after the last step.

    Lightning's own `ModelCheckpoint` does not save the steps after the last validation. With
    `ckpt_path=last` a run goes on from its newest checkpoint, whatever the file is called, also
    where the logger has put it into a numbered folder (`version_3`).

    Args:
        filename: name of a checkpoint's file; `{step}`, and names of metrics in braces, are
            replaced by their values. A slash becomes a dash: `{step}-{eval/pass@1:.3f}` gives
            `step=20-eval-pass@1=0.750.ckpt`.
        save_last: whether to keep a copy of the newest checkpoint as `last.ckpt`.
        save_on_exception: whether to save also when the run is interrupted or fails. Nothing is
            saved before training begins, in the middle of an update, where a weight or the
            optimizer's state is not finite, or when one of several processes fails.
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
        self._has_begun = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._has_begun = False
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a strategy of Lightning's
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            # Each version of a run has a folder of its own, so after a resume this is no news.
            warnings.filterwarnings("ignore", "The dirpath has changed")
            super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._has_begun = True

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not self._has_begun:
            return  # a checkpoint may be loaded in part, and what was saved is what there is
        reason = _why_not_saved(trainer, pl_module, exception)
        if reason:
            kept = self._last_checkpoint_saved
            stays = f"the last one stays, {kept}" if kept else "this run has saved none"
            rank_zero_warn(f"no checkpoint is saved {reason}: {stays}")
            return
        super().on_exception(trainer, pl_module, exception)

    def _format_checkpoint_name(self, *args: Any, **options: Any) -> str:
        """A name without folders, which nobody would look into."""
        return super()._format_checkpoint_name(*args, **options).replace("/", "-")

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """All checkpoints of the run: after a kill, `last.ckpt` may not be the newest."""
        if is_remote(trainer):
            return super()._find_last_checkpoints(trainer)
        return checkpoints_like(self, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def _why_not_saved(trainer: Trainer, module: LightningModule, exception: BaseException) -> str:
    """Why no checkpoint of the present state should be saved; empty where one should."""
    if any(getattr(optimizer, "is_committing", False) for optimizer in trainer.optimizers):
        return "of this state, in the middle of an update"
    if isinstance(exception, CheckpointNotWrittenError):
        return "again"
    if isinstance(exception, PreemptedError):
        return ""
    if trainer.world_size > 1:  # the others may be waiting elsewhere, and a save needs them all
        return "by one process without the others"
    return "" if _is_finite(trainer, module) else "of this state, which is not finite"


def _is_finite(trainer: Trainer, module: LightningModule) -> bool:
    """Whether all weights and all of the optimizers' state are finite numbers."""
    states = [state for o in trainer.optimizers for state in o.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in [*module.parameters(), *tensors])
