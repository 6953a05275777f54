"""`StepCheckpoint`: a `ModelCheckpoint` whose last checkpoint is that of the last step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn


class StepCheckpoint(ModelCheckpoint):
    """Saves at each validation, and always where training ends, as `last.ckpt`.

    Lightning's own saves nothing of the steps after the last validation.

    Args:
        filename: of the others; `{step}` and metrics in braces are filled in.
        save_last: keep `last.ckpt`.
        save_on_exception: also save when the run is interrupted or fails, unless in the middle of
            an update or because something is not finite.
        options: of `ModelCheckpoint`, for instance `monitor: eval/pass@1, mode: max`.
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

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        half_done = any(getattr(o, "is_committing", False) for o in trainer.optimizers)
        if half_done or isinstance(exception, FloatingPointError):
            rank_zero_warn(
                "no checkpoint is saved of this state, "
                + ("in the middle of an update" if half_done else "which is not finite")
                + ": the last one stays"
            )
            return
        super().on_exception(trainer, pl_module, exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
