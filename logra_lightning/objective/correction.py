r"""Corrections: weights for tokens whose probabilities differ between engine and trainer.

With :math:`\rho_t = \exp(\mathrm{old\_logprobs}_t - \mathrm{rollout\_logprobs}_t)`, trainer over
engine on the same weights, a correction multiplies the gradient that flows back through the
logprob of each token; a token of weight 0 does not train at all, but stays in the denominators.
Subclass `Correction` for one of your own and name it by `class_path`.
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
        """[T] fp32 log ratios of trainer over engine to [T] weights; 0 masks a token."""


class TokenTruncation(Correction):
    r"""Truncated importance sampling (TIS), :math:`w_t = \min(\rho_t, \mathrm{cap})`.

    Source: Ionides, 2008; for rollout engines Yao et al., 2025.

    Args:
        cap: largest weight of a token.

    Raises:
        ValueError: a cap below 1.
    """

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, as in `Correction`."""
        return log_ratio.exp().clamp(max=self.cap)


class TokenMask(Correction):
    r"""Masked importance sampling by token (MIS, IcePop).

    .. math:: w_t = \rho_t\, 1[\mathrm{low} \le \rho_t \le \mathrm{high}]

    Args:
        low: smallest ratio of a token that is kept.
        high: largest one.

    Raises:
        ValueError: bounds that do not enclose 1.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, as in `Correction`."""
        return _inside(log_ratio, log_ratio, self.low, self.high)


class ProductMask(Correction):
    r"""Masked importance sampling by sequence, on the product of the ratios of its tokens.

    .. math:: w_t = \pi\, 1[\pi \le \mathrm{cap}], \qquad \pi = \prod_s \rho_s

    Products grow with the length: what is usual for 500 tokens masks most of 20,000.

    Args:
        cap: largest product of a completion that is kept.

    Raises:
        ValueError: a cap below 1.
    """

    def __init__(self, cap: float = 3.0) -> None:
        self.cap = _checked_cap(cap)

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, as in `Correction`."""
        lengths = microbatch.lengths.repeat_interleave(microbatch.lengths)
        product = microbatch.rollout_mean(log_ratio) * lengths
        return _inside(product, product, 0.0, self.cap)


class GeometricMeanMask(Correction):
    r"""Leaves out completions whose ratios are far from 1 in the geometric mean; weights stay 1.

    .. math:: w_t = 1[\mathrm{low} \le g \le \mathrm{high}], \qquad g = \big(\prod_s \rho_s
        \big)^{1/n}

    Args:
        low: smallest geometric mean of a completion that is kept.
        high: largest one.

    Raises:
        ValueError: bounds that do not enclose 1.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, as in `Correction`."""
        mean = microbatch.rollout_mean(log_ratio)
        return _inside(torch.zeros_like(log_ratio), mean, self.low, self.high)


class NoCorrection(Correction):
    """All weights are 1: for comparisons, and where the engine's logprobs are the policy's."""

    def __call__(self, log_ratio: Tensor, microbatch: Microbatch) -> Tensor:
        """[T] weights, as in `Correction`."""
        return torch.ones_like(log_ratio)


def _inside(log_weight: Tensor, log_ratio: Tensor, low: float, high: float) -> Tensor:
    """exp(log_weight) where low <= exp(log_ratio) <= high, else 0."""
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
