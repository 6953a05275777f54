"""`RelativeRowAdam`: the paper's rule for the length and the shares of a step (row 4)."""

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
    r"""The paper's rule: a step as long as a fixed fraction of the weights.

    Rows are normalized by their moments, and each layer keeps its share:

    .. math::
        u = 1 / (\sqrt{\hat v} + \epsilon\, \mathrm{mean}(\sqrt{\hat v})), \qquad
        D = u \odot S \cdot \|S\|_F / \|u \odot S\|_F, \qquad
        \sqrt{\textstyle\sum \|D A\|_F^2} = \mathrm{ratio} \cdot \sqrt{\textstyle\sum \|W\|_F^2}

    where the last line fixes one factor for all layers. It is found without the dense update:
    :math:`\|S A\|_F^2 = \langle S (A A^T), S \rangle`.

    Source: LoGRA, arXiv 2610.06647.

    Args:
        params: as in `RowAdam`.
        sketches: as in `RowAdam`.
        adamw: as in `RowAdam`.
        max_grad_norm: as in `RowAdam`; with this rule it only bounds what enters the row moments.
        max_skipped_steps: as in `RowAdam`.
        update_ratio: norm of a step of scale 1 over the norm of the sketched weights. A scheduler
            changes it like a learning rate.
        beta2: decay of the row moments.
        eps: relative to the mean root of the row moments of a weight.
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
            scale = torch.where(square > 0, scale, 0.0)  # a zero sketch, or row, does not move
            scales[layer.name] = scale
            update += (scale.square() * _row_update_squares(layer)).sum().item()
        weights = sum(squared_norms([layer.module.weight for layer in self.sketches]))
        factor = group["lr"] * math.sqrt(weights / update) if update > 0 else 0.0
        return {name: scale * factor for name, scale in scales.items()}


def _row_update_squares(layer: SketchedLayer) -> Tensor:
    """Squared norms of the rows of `S A` [d] fp64, by the r x r Gram matrix."""
    rows = ((layer.total @ layer.gram()) * layer.total).sum(dim=1)
    return rows.to(torch.float64).clamp_min(0.0) * layer.scale**2
