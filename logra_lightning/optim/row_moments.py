"""Row moments: one second moment per row of a sketched weight (row 3 of docs/method.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import local
from logra_lightning.sketch.bank import SketchBank


def row_state(param: Tensor) -> dict[str, Tensor]:
    """The state of a sketched weight [d, k] before its first step.

    Row moments are of all rows in every process, also where the weight is sharded: they are small,
    and probe and engine need whole directions. The step counter stays on the CPU, so that reading
    it never waits for a GPU.

    Returns:
        `step` [] fp32, `row_moment` [d] fp32, and of a bf16 weight `residual` [held rows, k] int16.
    """
    held = local(param)
    state = {
        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
        "row_moment": torch.zeros(param.shape[0], dtype=torch.float32, device=held.device),
    }
    if param.dtype == torch.bfloat16:
        state["residual"] = torch.zeros_like(held, dtype=torch.int16)
    return state


def next_moments(
    sketches: SketchBank,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    squares: Mapping[str, Tensor],
    *,
    clip: float,
    beta2: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    r"""Row moments after a step, which is not made yet.

    .. math:: v \leftarrow \beta_2 v + (1 - \beta_2)\, \mathrm{mean}_r(S^2), \qquad
        \hat v = v / (1 - \beta_2^t)

    Args:
        sketches: the sketched layers.
        states: weight of a layer to its state, from `row_state`; it is not changed.
        squares: name of a layer to the squared norms of the rows of S [d] fp64, before clipping.
        clip: factor by which clipping multiplies S.
        beta2: decay of the moments.

    Returns:
        Name of a layer to v [d] fp32; name of a layer to the root of v-hat [d] fp64; and the norm
        that the gradient of earlier steps had by their moments, 0 at the first step.
    """
    moments, roots, usual = {}, {}, 0.0
    for layer in sketches:
        state = states[layer.module.weight]
        mean_square = squares[layer.name] * (clip**2 / sketches.rank)
        moment = state["row_moment"].to(torch.float64)
        if state["step"] > 0:
            corrected = moment.sum().item() / (1 - beta2 ** state["step"].item())
            usual += corrected * sketches.rank
        moment = moment * beta2 + mean_square * (1 - beta2)
        moments[layer.name] = moment.to(torch.float32)
        correction = 1 - beta2 ** (state["step"].item() + 1)
        roots[layer.name] = (moment / correction).sqrt()
    return moments, roots, math.sqrt(usual)
