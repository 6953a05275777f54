"""Optimizers: what makes a step of the sketches, and AdamW for everything else."""

from logra_lightning.optim.adamw import AdamWOptions
from logra_lightning.optim.proposal import Proposal
from logra_lightning.optim.relative_row_adam import RelativeRowAdam
from logra_lightning.optim.row_adam import OptimizerFactory, RowAdam

__all__ = ["AdamWOptions", "OptimizerFactory", "Proposal", "RelativeRowAdam", "RowAdam"]
