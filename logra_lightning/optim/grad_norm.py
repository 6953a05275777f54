"""The norm of the whole gradient, sketched and dense, and the factor that clips it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import squared_norms


def whole_norm(
    squares: Mapping[str, Tensor], gradients: Mapping[str, Tensor], order: Sequence[str]
) -> tuple[float, str]:
    """Norm of the whole gradient before clipping, and what of it is not finite.

    The squared norm of a sketch stands for that of its dense gradient: it is right on average over
    projections.

    Args:
        squares: name of a layer to the squared norms of the rows of S, [d] fp64.
        gradients: name of a dense parameter to its gradient, sharded or not.
        order: all these names, in the order of the forward pass.

    Returns:
        The norm and an empty string; or NaN and what `not_finite` says.
    """
    names = [*squares, *gradients]
    totals = torch.stack([square.sum() for square in squares.values()]).tolist()
    totals += squared_norms(list(gradients.values()))
    problem = not_finite(dict(zip(names, totals, strict=True)), order)
    return (math.nan, problem) if problem else (math.sqrt(sum(totals)), "")


def not_finite(norms: Mapping[str, float], order: Sequence[str]) -> str:
    """Tell how many gradients are not finite, and where the backward pass first met one.

    The backward pass runs from the last layer to the first, and what is not finite in one layer
    spoils all before it. So it began in the last one, in the order of the forward pass.

    Args:
        norms: name of a weight to the norm of its gradient, squared or not.
        order: all names in the order of the forward pass.

    Returns:
        Words for a message, empty where all are finite.
    """
    bad = [name for name in order if name in norms and not math.isfinite(norms[name])]
    if not bad:
        return ""
    return (
        f"the gradient is not finite in {len(bad)} of {len(norms)} weights, in the backward pass "
        f"first in {bad[-1]!r}"
    )


def clip_factor(grad_norm: float, max_norm: float | None) -> float:
    """What the gradient is multiplied by so that its norm is at most `max_norm`; 1 if that is None.

    A norm of 4 with `max_norm=1` gives .25.
    """
    if max_norm is None or grad_norm <= max_norm:
        return 1.0
    return max_norm / grad_norm
