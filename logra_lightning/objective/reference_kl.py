r"""Estimators of KL(policy || reference) at each token, as a term of the loss.

They are functions of the difference between the two logprobs of a sampled token,

.. math:: \delta_t = \mathrm{logprobs}_t - \mathrm{reference\_logprobs}_t

Source of the estimators: Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class ReferenceKL(ABC):
    """What `Objective` asks of an estimator.

    Attributes:
        coefficient: factor beta that multiplies the KL in the loss.
    """

    coefficient: float

    @abstractmethod
    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """Return the [T] estimates, fp32, nats.

        Args:
            logprobs: [T] fp32, nats, under the policy, with gradient.
            reference_logprobs: [T] fp32, nats, under the frozen reference.
        """


class K1(ReferenceKL):
    r"""The estimate :math:`\delta_t`: unbiased, with a large variance, and sometimes negative.

    The derivative of :math:`\delta_t` has expectation zero, so it would not hold the policy back.
    This class gives the estimate the derivative :math:`\delta_t \nabla \mathrm{logprobs}_t`
    instead. While the policy is the one that sampled, its expectation is the gradient of the KL of
    each token, given the tokens before it.

    Args:
        coefficient: factor that multiplies the KL in the loss; above 0.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] fp32 nats, see `ReferenceKL`."""
        delta = logprobs - reference_logprobs
        square = delta.square() / 2
        return delta.detach() + (square - square.detach())


class K2(ReferenceKL):
    r"""The estimate :math:`\delta_t^2 / 2`: a low variance, and a small bias of higher order.

    Its derivative is that of `K1`: in expectation the gradient of the KL.

    Args:
        coefficient: factor that multiplies the KL in the loss; above 0.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] fp32 nats, see `ReferenceKL`."""
        return (logprobs - reference_logprobs).square() / 2


class K3(ReferenceKL):
    r"""The estimate :math:`e^{-\delta_t} - 1 + \delta_t`: unbiased and never negative.

    In expectation its gradient is that of KL(reference || policy), which agrees with that of
    KL(policy || reference) to leading order. GRPO uses this one.

    Args:
        coefficient: factor that multiplies the KL in the loss; above 0.
    """

    def __init__(self, coefficient: float = 1e-3) -> None:
        self.coefficient = _checked(coefficient)

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] fp32 nats, see `ReferenceKL`."""
        delta = logprobs - reference_logprobs
        return torch.expm1(-delta) + delta


def _checked(coefficient: float) -> float:
    if not 0 < coefficient < float("inf"):
        raise ValueError(
            f"the coefficient of a reference KL must be positive, got {coefficient}: without one, "
            f"leave model.objective.reference_kl out"
        )
    return coefficient
