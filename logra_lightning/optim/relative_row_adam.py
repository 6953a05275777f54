"""`RelativeRowAdam`: the paper's rule for the direction (row 4 of docs/method.md)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import squared_norms
from logra_lightning.optim.adamw import AdamWOptions
from logra_lightning.optim.row_adam import RowAdam
from logra_lightning.optim.state import NamedParameters
from logra_lightning.sketch.bank import SketchBank, SketchedLayer


class RelativeRowAdam(RowAdam):
    r"""The paper's rule: an update whose norm is a fixed fraction of that of the weights.

    Rows are divided by the roots of their moments. Then each layer is scaled back to the norm of
    its sketch, and all layers are multiplied by one factor:

    .. math::
        u = 1 / (\sqrt{\hat v} + \epsilon\, \mathrm{mean}(\sqrt{\hat v})), \qquad
        D = \mathrm{factor} \cdot u \odot S \cdot \|S\|_F / \|u \odot S\|_F

    The factor is such that, with sums over all sketched layers,

    .. math::
        \sqrt{\textstyle\sum \|D A\|_F^2} = \mathrm{ratio} \cdot \sqrt{\textstyle\sum \|W\|_F^2}

    :math:`D A` is never computed for it: :math:`\|S A\|_F^2 = \langle S (A A^T), S \rangle`.

    Source: LoGRA, arXiv 2610.06647.

    Args:
        params: all parameters of the model, as in `RowAdam`.
        sketches: the sketches, as in `RowAdam`.
        adamw: options for the weights that are not sketched.
        max_grad_norm: clip the norm of the whole gradient to this value; None does not clip. The
            length of an update is `update_ratio` either way; clipping only bounds what one step
            adds to the row moments, and the gradients that AdamW gets.
        max_skipped_steps: number of steps in a row that may be skipped, as in `RowAdam`.
        update_ratio: norm of an update of step scale 1, divided by the norm of all sketched
            weights. A learning-rate scheduler changes it like `lr`.
        beta2: decay of the row moments.
        eps: added to the roots of a layer's row moments, as a fraction of their mean.

    Raises:
        ValueError: a value is out of range, or a sketched weight is not among `params`.
    """

    def __init__(
        self,
        params: NamedParameters,
        sketches: SketchBank,
        adamw: AdamWOptions | None = None,
        max_grad_norm: float | None = None,
        *,
        max_skipped_steps: int = 3,
        update_ratio: float = 6e-5,
        beta2: float = 0.95,
        eps: float = 1e-8,
    ) -> None:
        if update_ratio <= 0:
            raise ValueError(f"update_ratio must be positive, got {update_ratio}")
        super().__init__(
            params,
            sketches,
            adamw,
            max_grad_norm,
            max_skipped_steps=max_skipped_steps,
            lr=update_ratio,
            beta2=beta2,
            eps=eps,
        )

    def _row_scales(
        self, squares: dict[str, Tensor], roots: dict[str, Tensor], clip: float
    ) -> dict[str, Tensor]:
        group = self.param_groups[0]
        scales, update = {}, 0.0
        for layer in self.sketches:
            square, root = squares[layer.name], roots[layer.name]
            u = 1.0 / (root + group["eps"] * root.mean())
            length = (u.square() * square).sum()
            scale = u * (square.sum() / length).sqrt()
            # A row of zeros does not move; of a sketch of zeros the scale would be NaN.
            scale = torch.where(square > 0, scale, 0.0)
            scales[layer.name] = scale
            update += (scale.square() * _row_update_squares(layer)).sum().item()
        weights = sum(squared_norms([layer.module.weight for layer in self.sketches]))
        factor = group["lr"] * math.sqrt(weights / update) if update > 0 else 0.0
        return {name: scale * factor for name, scale in scales.items()}


def _row_update_squares(layer: SketchedLayer) -> Tensor:
    """Squared norms of the rows of `S A`, [d] fp64, by the Gram matrix `A A^T` [r, r]."""
    rows = ((layer.total @ layer.gram()) * layer.total).sum(dim=1)
    return rows.to(torch.float64).clamp_min(0.0) * layer.scale**2
