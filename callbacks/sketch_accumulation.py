"""`SketchAccumulation`: begins the sketches of a run, and logs what the optimizer made of them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from logra_lightning.optim import RowAdam
from logra_lightning.optim.row_adam import row_adam_of
from logra_lightning.sketch import SketchBank


class SketchAccumulation(Callback):
    """Begins the sketches when training starts, says how long projections are kept, and logs.

    The strategy has the sketches as `strategy.sketches` and begins each further step itself. The
    number of a step is `trainer.global_step`, so a resumed run makes the same projections. With a
    strategy without sketches the callback is inactive and says so once.

    Logs at every step `sketch/norm` (norm of all sketches together, an estimate of the norm of the
    sketched gradient), `sketch/zero_frac` (fraction of the sketched weights whose sketch is zero),
    `optim/grad_norm` (norm of the whole gradient, dense weights included, before clipping),
    `optim/step_scale` (0 if the step changed nothing), and the number of steps so far that were
    skipped because something was not finite (`optim/skipped_steps`) or rejected because their KL
    was too large (`optim/rejected_steps`).

    Args:
        refresh_every: number of steps for which projections are kept before new ones are drawn.

    Raises:
        ValueError: `refresh_every` is below 1.

    Example::

        trainer = Trainer(strategy=SketchStrategy(rank=64), callbacks=[SketchAccumulation()])
    """

    def __init__(self, refresh_every: int = 1) -> None:
        if refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        self.refresh_every = refresh_every

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sketches = _sketches(trainer)
        if sketches is None:
            rank_zero_info(
                f"SketchAccumulation is inactive: {type(trainer.strategy).__name__} has no "
                f"sketches."
            )
            return
        sketches.refresh_every = self.refresh_every
        sketches.begin_step(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        sketches = _sketches(trainer)
        if sketches is None:
            return
        norms = torch.stack(
            [torch.linalg.vector_norm(layer.total) * layer.scale for layer in sketches]
        )
        pl_module.log("sketch/norm", torch.linalg.vector_norm(norms))
        pl_module.log("sketch/zero_frac", (norms == 0).to(torch.float32).mean())
        if isinstance(optimizer, RowAdam):
            pl_module.log("optim/grad_norm", optimizer.propose().grad_norm)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        optimizer = row_adam_of(trainer.optimizers)
        if optimizer is not None:
            pl_module.log("optim/step_scale", optimizer.last_step_scale, prog_bar=True)
            pl_module.log("optim/skipped_steps", float(optimizer.counts.skipped_steps))
            pl_module.log("optim/rejected_steps", float(optimizer.counts.rejected_steps))


def _sketches(trainer: Trainer) -> SketchBank | None:
    return getattr(trainer.strategy, "sketches", None)
