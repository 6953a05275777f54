"""Policy-gradient losses on the completion tokens of one microbatch.

A loss is a callable `(logprobs [T], microbatch, num_completion_tokens) -> (loss, stats)`. It
divides by the completion tokens of the whole optimizer step over all ranks, so cutting the batch
into other microbatches changes nothing. Each of its stats is the microbatch's share of a mean over
those tokens: add them up over microbatches.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from logra_lightning.types import Microbatch


class Loss(Protocol):
    """What the module asks of a loss."""

    def __call__(
        self, logprobs: Tensor, microbatch: Microbatch, num_completion_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its stats, each this microbatch's share of the whole step's."""
        ...


class ClippedPolicyGradient:
    r"""PPO's clipped surrogate, a mean over tokens.

    .. math::
        L = -\frac{1}{N} \sum_t \min\big(\rho_t A_t,\ \mathrm{clip}(\rho_t,
        1 - \epsilon_{low}, 1 + \epsilon_{high})\, A_t\big), \qquad
        \rho_t = \exp(\mathrm{logprobs}_t - \mathrm{rollout\_logprobs}_t)

    Source: PPO, arXiv 1707.06347; separate bounds and the mean over all tokens of the batch:
    DAPO, arXiv 2503.14476.

    Args:
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1 the ratio still counts.

    Raises:
        ValueError: a bound out of range.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        if not 0 < clip_low <= 1 or not clip_high > 0:
            raise ValueError(
                f"clip_low must be above 0 and at most 1, clip_high above 0; got {clip_low} and "
                f"{clip_high}"
            )
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(
        self, logprobs: Tensor, microbatch: Microbatch, num_completion_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of T tokens, and its stats.

        Args:
            logprobs: [T] fp32, nats, of the trained tokens under the policy.
            microbatch: holds `advantages` and `rollout_logprobs` [T].
            num_completion_tokens: N, of the whole step over all ranks.

        Returns:
            [] fp32 loss, and `loss/policy`, `loss/clip_frac`, `mismatch/logprob_diff`,
            `mismatch/is_ratio`.
        """
        difference = logprobs - microbatch.rollout_logprobs
        ratio = difference.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        advantages = microbatch.advantages
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        loss = -surrogate.sum() / num_completion_tokens
        with torch.no_grad():
            is_clipped = surrogate != ratio * advantages
            stats = {
                "loss/policy": loss,
                "loss/clip_frac": is_clipped.sum() / num_completion_tokens,
                "mismatch/logprob_diff": difference.abs().sum() / num_completion_tokens,
                "mismatch/is_ratio": ratio.sum() / num_completion_tokens,
            }
        return loss, {name: value.detach() for name, value in stats.items()}
