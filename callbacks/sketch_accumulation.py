"""`SketchAccumulation`: when a step begins, for how long a projection holds, what is logged."""

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
    """Begins each step's sketches and logs their size.

    The strategy must have `sketches` (a `SketchBank` during fit), as ours do; the number of the
    step is `trainer.global_step`, so a resumed run goes on with the same projections. Without
    sketches it does nothing and says so once.

    Logs `sketch/norm` (Frobenius norm of all sketches, an estimate of the gradient's),
    `sketch/zero_frac` (share of sketched weights without a gradient), `optim/grad_norm` (dense
    weights included), `optim/step_scale`, and how many steps were skipped (`optim/skipped_steps`,
    something was not finite) or rejected (`optim/rejected_steps`, the KL was too large) so far.

    Args:
        refresh_every: steps for which a projection holds.

    Raises:
        ValueError: `refresh_every` below 1.

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
        norms = torch.stack([torch.linalg.vector_norm(s.total) * s.scale for s in sketches])
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
            pl_module.log("optim/skipped_steps", float(optimizer.skipped_steps))
            pl_module.log("optim/rejected_steps", float(optimizer.rejected_steps))


def _sketches(trainer: Trainer) -> SketchBank | None:
    return getattr(trainer.strategy, "sketches", None)
