"""`Proposal`: a step before it is made, whose scale callbacks set, or which they call off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.sketch.bank import SketchedLayer

# A gradient this small, as a fraction of the usual one, is what rounding leaves of zero.
ROUNDING = 1e-5


@dataclass
class Proposal:
    """A step as `RowAdam` would make it, and what callbacks decide about it.

    `RowAdam.propose` makes it and `RowAdam.step` ends it. Between the two a callback may set
    `scale`, or call `skip` or `reject`::

        proposal = optimizer.propose()
        proposal.scale = 0.5

    What the step does is decided by the first of these that holds:

    - *skipped*: `problem` is not empty. No weight and no moment changes, and the step counts in
      `StepCounts.skipped_steps`.
    - *rejected*: `is_rejected`. Nothing changes, and the step counts in
      `StepCounts.rejected_steps`.
    - *zero*: `is_zero`. No weight changes. Unless the gradient is exactly zero, moments become
      `row_moments`: they decay, and the usual norm falls with them.
    - *committed*: weights move by `scale` times the direction, and moments become `row_moments`.
      The step counts in `StepCounts.updates`.

    Args:
        row_scales: name of a layer to c [d] fp64. Both rules only scale the rows of the sketch, so
            the direction is `D = c * S`, row by row.
        row_moments: name of a layer to its row moment v [d] fp32 after the step.
        decay_rate: weights are multiplied by `1 - scale * decay_rate` before the direction is
            subtracted.
        grad_norm: norm of the gradient of all trained weights before clipping. The sketched part
            is the norm of the sketches, whose square is right on average.
        problem: why the step cannot be made, for example which weight's gradient is not finite;
            empty when it can.
        usual_norm: norm of the gradient of earlier steps, by the row moments; 0 at the first step.
        scale: the step scale, which multiplies the direction and the decay rate.
        is_rejected: whether `reject` was called.
        rejection: why it was called, for messages.
    """

    row_scales: dict[str, Tensor]
    row_moments: dict[str, Tensor]
    decay_rate: float
    grad_norm: float
    problem: str = ""
    usual_norm: float = 0.0
    scale: float = 1.0
    is_rejected: bool = False
    rejection: str = ""

    def skip(self, reason: str) -> None:
        """Let the step change nothing because something is not finite; the first reason is kept.

        Args:
            reason: what is not finite and where, for the warning.
        """
        self.problem = self.problem or reason

    def reject(self, reason: str = "") -> None:
        """Let the step change nothing because it would go too far.

        Args:
            reason: how far, and which option to change, for the message after several in a row.
        """
        self.is_rejected = True
        self.rejection = reason

    @property
    def is_zero(self) -> bool:
        """Whether the gradient is zero but for rounding.

        When the loss clips every token, rounding leaves a tiny gradient. A rule that normalizes
        would make a step of full length of it.
        """
        return self.grad_norm <= ROUNDING * self.usual_norm

    @property
    def decays_moments(self) -> bool:
        """Whether the step changes row moments alone, as things stand.

        If it did not, the usual norm would stay, and after one huge gradient no other would be
        large enough again. A gradient of exactly zero has no part in the moments.
        """
        return self.is_zero and self.grad_norm > 0 and not (self.problem or self.is_rejected)

    @property
    def is_committed(self) -> bool:
        """Whether the step changes weights and moments, as things stand."""
        return not (self.problem or self.is_rejected or self.is_zero)

    def direction(self, layer: SketchedLayer) -> Tensor:
        """D [d, r] fp32 of one layer, before the step scale."""
        scale = self.row_scales[layer.name] * layer.scale
        return layer.total * scale.to(torch.float32)[:, None]

    def rounded_direction(self, layer: SketchedLayer, step_scale: float) -> Tensor:
        """`step_scale * D` [d, r] bf16 of one layer: what is merged at that scale and sent."""
        return (self.direction(layer) * step_scale).to(torch.bfloat16)
