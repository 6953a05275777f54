"""`ValidateAtEnds`: validation before the first step and after the last one."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class ValidateAtEnds(Callback):
    """Validates before the first step and after the last one.

    So the curves of a run show where it began and where it ended. The first validation is left out
    in a run that resumes from a checkpoint, the last one where that step has already been
    validated.
    """

    def __init__(self) -> None:
        self._validated_step = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_step = -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 and self._validated_step < 0:
            self._validate(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_step < trainer.global_step:
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        """Run the validation loop as Lightning does between two training batches."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not trainer.enable_validation:
            return
        connector = trainer._logger_connector
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration
