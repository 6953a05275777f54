"""The method on plain torch: projections, sketches, RowAdam, factors.

Symbols: W [d, k] weight, X [N, k] input, H [N, d] output gradient, A [r, k] projection,
S = H^T X A^T [d, r] sketch, v [d] row moment, D [d, r] direction. Source: arXiv 2610.06647.
"""

from logra_lightning.sketch.adamw import AdamWOptions
from logra_lightning.sketch.bank import DEFAULT_TARGETS, Sketch, SketchBank, find_targets
from logra_lightning.sketch.capture import SketchCapture
from logra_lightning.sketch.factors import Factors
from logra_lightning.sketch.merge import merge_
from logra_lightning.sketch.predicted_kl import KLProbe
from logra_lightning.sketch.projection import gaussian, rademacher
from logra_lightning.sketch.proposal import Proposal
from logra_lightning.sketch.relative_row_adam import RelativeRowAdam
from logra_lightning.sketch.row_adam import RowAdam

__all__ = [
    "DEFAULT_TARGETS",
    "AdamWOptions",
    "Factors",
    "KLProbe",
    "Proposal",
    "RelativeRowAdam",
    "RowAdam",
    "Sketch",
    "SketchBank",
    "SketchCapture",
    "find_targets",
    "gaussian",
    "merge_",
    "rademacher",
]
