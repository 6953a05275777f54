"""`Proposal`: a step as it would be, before its scale is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.sketch.bank import SketchedLayer

_ROUNDING = 1e-5  # of the usual gradient


@dataclass(frozen=True)
class Proposal:
    """What a step would do before its step scale.

    Args:
        row_scales: name to c [d] fp64; the direction is `D = c * S`, row by row.
        row_moments: name to v [d] fp32 after this step.
        decay_rate: weights are multiplied by `1 - step_scale * decay_rate` before the merge.
        grad_norm: Frobenius norm of the gradient of all trained weights before clipping; the
            sketched part is estimated by its sketches, without bias in the square.
        problem: why the step cannot be made, such as the name of a weight whose gradient is not
            finite; else empty.
        usual_norm: what the row moments say of the gradient of earlier steps; 0 at the first.
    """

    row_scales: dict[str, Tensor]
    row_moments: dict[str, Tensor]
    decay_rate: float
    grad_norm: float
    problem: str = ""
    usual_norm: float = 0.0

    @property
    def is_zero(self) -> bool:
        """Whether there is no gradient but rounding: the step changes nothing, moments included.

        Rules that normalize would make as long a step of what is left when every token is clipped.
        """
        return self.grad_norm <= _ROUNDING * self.usual_norm

    def direction(self, layer: SketchedLayer) -> Tensor:
        """D [d, r] fp32 of one weight."""
        scale = self.row_scales[layer.name] * layer.scale
        return layer.total * scale.to(torch.float32)[:, None]

    def rounded_direction(self, layer: SketchedLayer, step_scale: float) -> Tensor:
        """D [d, r] bf16 times the step scale: what is merged and what engines get."""
        return (self.direction(layer) * step_scale).to(torch.bfloat16)
