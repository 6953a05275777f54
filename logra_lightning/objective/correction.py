r"""Corrections: weights for tokens to which engine and trainer give different probabilities.

Engine and trainer hold the same weights and still compute slightly different probabilities. Their
ratio for a token, trainer over engine, is

.. math:: \rho_t = \exp(\mathrm{old\_logprobs}_t - \mathrm{rollout\_logprobs}_t)

A correction turns these ratios into one weight per token, which multiplies the gradient that flows
back through the token's logprob. A token with weight 0 does not train, but still counts where the
loss is divided by a number of tokens. For one of your own, subclass `Correction` and name it by
`class_path`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from logra_lightning.types import Microbatch


class Correction(ABC):
    """What `Objective` asks of a correction."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        r"""Turn [T] fp32 log ratios into [T] weights; weight 0 masks a token.

        Args:
            log_ratio: [T] fp32, nats, :math:`\log \rho_t` of each trained token.
            microbatch: the tokens; its `lengths` say which of them belong to one completion.
        """


class TokenTruncation(Correction):
    r"""Truncated importance sampling (TIS), :math:`w_t = \min(\rho_t, \mathrm{cap})`.

    With cap 2, ratios [.5, 1, 3] become the weights [.5, 1, 2].

    Source: Ionides, 2008; for rollout engines Yao et al., 2025.

    Args:
        cap: largest weight that a token can get; at least 1.

    Raises:
        ValueError: the cap is below 1.
    """

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, see `Correction`."""
        return log_ratio.exp().clamp(max=self.cap)


class TokenMask(Correction):
    r"""Masked importance sampling by token (MIS, IcePop).

    .. math:: w_t = \rho_t\, 1[\mathrm{low} \le \rho_t \le \mathrm{high}]

    With low .5 and high 2, ratios [.4, 1, 3] become the weights [0, 1, 0].

    Args:
        low: smallest ratio at which a token still trains; above 0 and at most 1.
        high: largest ratio at which a token still trains; at least 1.

    Raises:
        ValueError: low and high do not enclose 1.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, see `Correction`."""
        return _inside(log_ratio, log_ratio, self.low, self.high)


class ProductMask(Correction):
    r"""Masked importance sampling by completion, on the product of the ratios of its tokens.

    .. math:: w_t = \pi\, 1[\pi \le \mathrm{cap}], \qquad \pi = \prod_s \rho_s

    The product runs over all tokens s of the completion, and all of them get the same weight. With
    cap 3, completions with ratios [1, 2] and [2, 2] get the weights [2, 2] and [0, 0]. Products
    grow with the length: a cap that suits completions of 500 tokens masks most of those of 20,000.

    Args:
        cap: largest product at which a completion still trains; at least 1.

    Raises:
        ValueError: the cap is below 1.
    """

    def __init__(self, cap: float = 3.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, see `Correction`."""
        lengths = microbatch.lengths.repeat_interleave(microbatch.lengths)
        product = microbatch.rollout_mean(log_ratio) * lengths
        return _inside(product, product, 0.0, self.cap)


class GeometricMeanMask(Correction):
    r"""Masks whole completions whose ratios have a geometric mean far from 1.

    .. math:: w_t = 1[\mathrm{low} \le g \le \mathrm{high}], \qquad g = \big(\prod_s \rho_s
        \big)^{1/n}

    The product runs over the n tokens of the completion. The tokens of all other completions have
    weight 1.

    Args:
        low: smallest geometric mean at which a completion still trains; above 0 and at most 1.
        high: largest geometric mean at which a completion still trains; at least 1.

    Raises:
        ValueError: low and high do not enclose 1.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, see `Correction`."""
        mean = microbatch.rollout_mean(log_ratio)
        return _inside(torch.zeros_like(log_ratio), mean, self.low, self.high)


class NoCorrection(Correction):
    """Gives every token weight 1: for comparisons, or where engine and trainer agree exactly."""

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, see `Correction`."""
        return torch.ones_like(log_ratio)


def _inside(log_weight: Tensor, log_ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] exp(log_weight) where low <= exp(log_ratio) <= high, else 0."""
    floor = math.log(low) if low > 0 else -math.inf
    kept = (log_ratio >= floor) & (log_ratio <= math.log(high))
    return torch.where(kept, log_weight.exp(), torch.zeros_like(log_weight))


def _checked_cap(cap: float) -> float:
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    return cap


def _check_band(low: float, high: float) -> None:
    if not 0 < low <= 1 <= high < math.inf:
        raise ValueError(f"low and high must enclose 1, with low above 0, got {low} and {high}")
