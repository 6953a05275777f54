r"""Estimators of KL(policy || reference), token by token, as terms of the loss.

With :math:`\delta_t = \mathrm{logprobs}_t - \mathrm{reference\_logprobs}_t` of a sampled token.

Source of the estimators: Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class ReferenceKL(ABC):
    """What `Objective` asks of an estimator.

    Attributes:
        coefficient: of the term in the loss.
    """

    coefficient: float

    @abstractmethod
    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] fp32 logprobs under policy (with gradient) and reference to [T] nats."""


class K1(ReferenceKL):
    r"""Value :math:`\delta_t`: without bias, of large variance, negative at times.

    Its own derivative has expectation zero and would hold nothing back. This has the derivative
    :math:`\delta_t \nabla \mathrm{logprobs}_t` instead: on-policy, that of the KL of each token
    after the prefix it was sampled with.

    Args:
        coefficient: of the term in the loss.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] nats, as in `ReferenceKL`."""
        delta = logprobs - reference_logprobs
        square = delta.square() / 2
        return delta.detach() + (square - square.detach())


class K2(ReferenceKL):
    r"""Value :math:`\delta_t^2 / 2`: low variance, a bias of higher order, the gradient of KL.

    Args:
        coefficient: of the term in the loss.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] nats, as in `ReferenceKL`."""
        return (logprobs - reference_logprobs).square() / 2


class K3(ReferenceKL):
    r"""Value :math:`e^{-\delta_t} - 1 + \delta_t`: without bias and never negative.

    Its gradient is that of KL(reference || policy), to leading order the same. It is GRPO's.

    Args:
        coefficient: of the term in the loss.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] nats, as in `ReferenceKL`."""
        delta = logprobs - reference_logprobs
        return torch.expm1(-delta) + delta


def _checked(coefficient: float) -> float:
    if not 0 < coefficient < float("inf"):
        raise ValueError(
            f"the coefficient of a reference KL must be positive, got {coefficient}: without one, "
            f"leave model.reference_kl out"
        )
    return coefficient
