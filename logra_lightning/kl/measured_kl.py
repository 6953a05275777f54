"""The KL of an update that is not made yet (row 6 of docs/method.md).

In fp32 it is that of two forward passes, before and after. In bf16 these differ by rounding noise
far larger than a small update; there it is taken by a tangent halfway along the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.kl.predicted_kl import logit_tangents


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
def midpoint_kl(
    probe: KLProbe,
    old: Sequence[Tensor],
    halfway: Sequence[tuple[Tensor, Tensor]],
    *,
    chunk_tokens: int | None = None,
) -> Tensor:
    r"""The sum of KL(old || new) over the tokens, with the change of the logits by a midpoint rule.

    .. math:: \mathrm{KL}(\mathrm{softmax}(z) \,\|\, \mathrm{softmax}(z + dz)), \qquad
        dz = J(W + dW / 2)[dW]

    The change of the logits is the integral of their derivative along the update; the midpoint
    rule leaves an error of third order in its size.

    Args:
        probe: turns hidden states into logits.
        old: hidden states [T, H] of each forward pass before the update.
        halfway: hidden states [T, H] after half the update and their derivatives [T, H] along all
            of it, from `tangents(..., at=0.5)`.
        chunk_tokens: as in `measured_kl`.

    Returns:
        [2] fp64: the sum in nats, and the number of tokens.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for before, (hidden, tangent) in zip(old, halfway, strict=True):
        chunk = chunk_tokens or probe.chunk_tokens(before)
        parts = (tensor.split(chunk) for tensor in (before, hidden, tangent))
        for a, h, dh in zip(*parts, strict=True):
            z = probe.logits(a).to(torch.float64)
            dz = logit_tangents(probe, h, dh)[1].to(torch.float64)
            total += kl_divergence(z, z + dz).sum()
            count += a.shape[0]
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
