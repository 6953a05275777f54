"""The KL of an update that is not made yet (row 6 of docs/method.md).

In fp32 it is that of two forward passes, before and after. In bf16 these differ by rounding noise
far larger than a small update; there it is taken by derivatives at two points of the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.kl.predicted_kl import logit_tangents

LATER = 2 / 3  # where along the update the second of two derivatives is taken


@torch.no_grad()
def measured_kl(
    probe: KLProbe, old: Sequence[Tensor], new: Sequence[Tensor], *, chunk_tokens: int | None = None
) -> Tensor:
    """The sum of KL(old || new) over the tokens.

    Args:
        probe: turns hidden states into logits.
        old: hidden states [T, H] of each forward pass before the update.
        new: the same after the update.
        chunk_tokens: number of tokens whose logits [chunk_tokens, V] exist at a time; None takes
            `probe.chunk_tokens`.

    Returns:
        [2] fp64: the sum in nats, and the number of tokens.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for before, after in zip(old, new, strict=True):
        chunk = chunk_tokens or probe.chunk_tokens(before)
        for a, b in zip(before.split(chunk), after.split(chunk), strict=True):
            total += kl_divergence(probe.logits(a), probe.logits(b)).sum()
            count += a.shape[0]
    return torch.stack([total, total.new_tensor(count)])


@torch.no_grad()
def tangent_kl(
    probe: KLProbe,
    start: Sequence[tuple[Tensor, Tensor]],
    later: Sequence[tuple[Tensor, Tensor]],
    *,
    scale: float,
    chunk_tokens: int | None = None,
) -> Tensor:
    r"""The sum of KL(old || new) over the tokens, with the change of the logits by two derivatives.

    .. math:: \mathrm{KL}(\mathrm{softmax}(z) \,\|\, \mathrm{softmax}(z + dz)), \qquad
        dz = \tfrac14 J(W)[dW] + \tfrac34 J(W + \tfrac23 dW)[dW]

    The change of the logits is the integral of their derivative along the update. Radau's rule with
    two points is exact where the derivative changes as a polynomial of second degree.

    Args:
        probe: turns hidden states into logits.
        start: hidden states [T, H] of each forward pass before the update, and their derivatives
            [T, H] along the update of scale 1, from `tangents`.
        later: the same after `LATER` of the update that is measured, along all of that update.
        scale: the scale of the update that is measured.
        chunk_tokens: as in `measured_kl`.

    Returns:
        [2] fp64: the sum in nats, and the number of tokens.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for pairs in zip(start, later, strict=True):
        tensors = [tensor for pair in pairs for tensor in pair]
        chunk = chunk_tokens or probe.chunk_tokens(tensors[0])
        for h0, dh0, h1, dh1 in zip(*(tensor.split(chunk) for tensor in tensors), strict=True):
            z, dz0 = logit_tangents(probe, h0, dh0)
            dz1 = logit_tangents(probe, h1, dh1)[1]
            z = z.to(torch.float64)
            dz = dz0.to(torch.float64) * (scale / 4) + dz1.to(torch.float64) * 0.75
            total += kl_divergence(z, z + dz).sum()
            count += h0.shape[0]
    return torch.stack([total, total.new_tensor(count)])


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(z) || softmax(z')) of each row.

    Args:
        logits: z [n, V].
        other: z' [n, V].

    Returns:
        [n] fp64, nats.
    """
    log_p = torch.log_softmax(logits.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(other.to(torch.float64), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
