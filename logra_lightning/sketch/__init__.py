"""The method on plain torch: projections, sketches, and the factors that are merged.

Symbols (docs/method.md draws them): W [d, k] weight, X [N, k] input and H [N, d] gradient of the
output for N tokens, A [r, k] projection, S = H^T X A^T [d, r] sketch, D [d, r] direction.

Source: LoGRA, arXiv 2610.06647.
"""

from logra_lightning.sketch.bank import SketchBank, SketchedLayer
from logra_lightning.sketch.capture import SketchCapture
from logra_lightning.sketch.factors import Factors
from logra_lightning.sketch.merge import merge_
from logra_lightning.sketch.projection import gaussian, rademacher
from logra_lightning.sketch.targets import DEFAULT_TARGETS, find_targets

__all__ = [
    "DEFAULT_TARGETS",
    "Factors",
    "SketchBank",
    "SketchCapture",
    "SketchedLayer",
    "find_targets",
    "gaussian",
    "merge_",
    "rademacher",
]
