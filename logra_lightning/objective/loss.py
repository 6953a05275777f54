"""Policy-gradient losses: one number for each trained token.

`Objective` weights these numbers, sums them, and adds its other terms. For a loss of your own,
subclass `Loss` and name it by `class_path`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from logra_lightning.types import Microbatch


class Loss(ABC):
    """What `Objective` asks of a loss."""

    @abstractmethod
    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token, and what to log.

        Args:
            logprobs: [T] fp32, nats, the logprob of each trained token under the policy, with
                gradient.
            log_ratio: [T] fp32, nats, `logprobs - old_logprobs`, with gradient. In the first step
                of a batch its values are zero, but not its gradient.
            microbatch: the tokens, with their `advantages` [T].

        Returns:
            [T] losses, and a dictionary from names of metrics to [T] values; the mean of these over
            the step's tokens is logged.
        """


class PPOClip(Loss):
    r"""PPO's clipped surrogate.

    .. math::
        L_t = -\min\big(\rho_t A_t,\ \mathrm{clip}(\rho_t, 1 - \epsilon_{low},
        1 + \epsilon_{high})\, A_t\big), \qquad \rho_t = \exp(\mathrm{log\_ratio}_t)

    With a dual clip c, the loss of a token with A < 0 is at most :math:`-c A_t`. With bounds of .2,
    a token with A > 0 is no longer pushed up once its ratio is above 1.2.

    Source: PPO, arXiv 1707.06347; separate bounds ("clip-higher"): DAPO, arXiv 2503.14476; dual
    clip: arXiv 1912.09729.

    Args:
        clip_low: how far below 1 a ratio may fall before it is clipped; above 0 and at most 1.
        clip_high: how far above 1 a ratio may rise before it is clipped; above 0. DAPO has .28.
        dual_clip: the bound c: the loss of a token with a negative advantage is at most c times the
            size of the advantage. Above 1; null sets no bound.

    Raises:
        ValueError: a bound is out of range.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
    ) -> None:
        if not 0 < clip_low <= 1 or not clip_high > 0:
            raise ValueError(
                f"clip_low must be above 0 and at most 1, clip_high above 0; got {clip_low} and "
                f"{clip_high}"
            )
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, got {dual_clip}: 3 and 10 are usual")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] losses and `loss/clip_frac`, see `Loss`."""
        advantages = microbatch.advantages
        ratio = log_ratio.exp()
        plain = -ratio * advantages
        loss = torch.maximum(plain, -_clip(ratio, self.clip_low, self.clip_high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.minimum(loss, -self.dual_clip * advantages)
            loss = torch.where(advantages < 0, bounded, loss)
        return loss, {"loss/clip_frac": (loss != plain).to(torch.float32)}


class CISPO(Loss):
    r"""A policy gradient weighted by a clipped importance ratio.

    .. math:: L_t = -\mathrm{sg}\big(\min(\rho_t, 1 + \epsilon_{high})\big)\, A_t\,
        \mathrm{logprobs}_t

    No gradient flows through the ratio (sg, stop gradient), so a clipped token still trains; under
    `PPOClip` it has no gradient at all.

    Source: MiniMax-M1, arXiv 2506.13585.

    Args:
        clip_high: how far above 1 the weight of a token may rise; above 0.
        clip_low: how far below 1 the weight may fall; above 0 and at most 1. null, as in the
            paper's runs, sets no bound.

    Raises:
        ValueError: a bound is out of range.
    """

    def __init__(self, clip_high: float = 4.0, clip_low: float | None = None) -> None:
        if not clip_high > 0 or not (clip_low is None or 0 < clip_low <= 1):
            raise ValueError(
                f"clip_high must be above 0 and clip_low above 0 and at most 1, or null; got "
                f"{clip_high} and {clip_low}"
            )
        self.clip_high = clip_high
        self.clip_low = clip_low

    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] losses and `loss/clip_frac`, see `Loss`."""
        ratio = log_ratio.detach().exp()
        weight = _clip(ratio, 1.0 if self.clip_low is None else self.clip_low, self.clip_high)
        loss = -weight * microbatch.advantages * logprobs
        return loss, {"loss/clip_frac": (weight != ratio).to(torch.float32)}


class GSPO(Loss):
    r"""The clipped surrogate with one ratio for a whole completion.

    .. math:: L_t = -\min\big(s A,\ \mathrm{clip}(s, 1 - \epsilon_{low}, 1 + \epsilon_{high})\, A
        \big), \qquad s = \exp\big(\mathrm{mean}_t\, \mathrm{log\_ratio}_t\big)

    All tokens of a completion have the same loss. The paper uses it with the normalizer
    `SequenceMean`.

    Source: GSPO, arXiv 2507.18071.

    Args:
        clip_low: how far below 1 the ratio s may fall before it is clipped; above 0 and at most 1.
        clip_high: how far above 1 the ratio s may rise before it is clipped; above 0. Both bounds
            are small, because s comes from a mean over tokens.

    Raises:
        ValueError: a bound is out of range.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        self._clipped = PPOClip(clip_low, clip_high)

    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] losses and `loss/clip_frac`, see `Loss`."""
        return self._clipped(logprobs, microbatch.rollout_mean(log_ratio), microbatch)


class Reinforce(Loss):
    r"""The plain policy gradient, :math:`L_t = -A_t\, \mathrm{logprobs}_t`.

    It has no ratio. Where a batch has several optimizer steps, the later ones therefore train as if
    the policy had not changed since the batch was sampled.

    Source: Williams, 1992.
    """

    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] losses, see `Loss`."""
        return -microbatch.advantages * logprobs, {}


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(1 - low, 1 + high)
