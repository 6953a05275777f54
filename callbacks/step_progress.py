"""`StepProgressBar`: a progress bar that counts optimizer steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class StepProgressBar(TQDMProgressBar):
    """Shows one progress bar from the first step to `max_steps`.

    Lightning's own counts the batches of an epoch instead. Behind the bar stand the metrics that
    were logged with `prog_bar=True`, each under the last part of its name: `reward`, `length`,
    `step_scale`, `pass@1`.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        bar = self.train_progress_bar
        bar.total = trainer.max_steps if trainer.max_steps > 0 else None
        bar.n = bar.initial = trainer.global_step
        bar.set_description("step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass  # Lightning would start the bar again at 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self.train_progress_bar
        if self._should_update(trainer.global_step, trainer.max_steps):
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            bar.update(trainer.global_step - bar.n)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name.rsplit("/", 1)[-1]: value for name, value in metrics.items()}
