"""The norm of the whole gradient, sketched and dense, and the factor that clips it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import squared_norms


def whole_norm(squares: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> tuple[float, str]:
    """Norm of the whole gradient before clipping, and what of it is not finite.

    The squared norm of a sketch stands for that of its dense gradient: it is right on average over
    projections.

    Args:
        squares: name of a layer to the squared norms of the rows of S, [d] fp64.
        gradients: name of a dense parameter to its gradient, sharded or not.

    Returns:
        The norm and an empty string; or NaN, and how many weights have a gradient that is not
        finite and the name of the first.
    """
    names = [*squares, *gradients]
    totals = torch.stack([square.sum() for square in squares.values()]).tolist()
    totals += squared_norms(list(gradients.values()))
    bad = [name for name, total in zip(names, totals, strict=True) if not math.isfinite(total)]
    if bad:
        return math.nan, (
            f"the gradient is not finite in {len(bad)} of {len(names)} weights, first in {bad[0]!r}"
        )
    return math.sqrt(sum(totals)), ""


def clip_factor(grad_norm: float, max_norm: float | None) -> float:
    """What the gradient is multiplied by so that its norm is at most `max_norm`; 1 if that is None.

    A norm of 4 with `max_norm=1` gives .25.
    """
    if max_norm is None or grad_norm <= max_norm:
        return 1.0
    return max_norm / grad_norm
