"""Estimators of the reference KL against exact sums over a small vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from logra_lightning.objective import K1, K2, K3
from tests.objective.batches import tensor

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
NEAR = LOGITS + 0.01 * torch.randn(6, generator=GENERATOR, dtype=torch.float64)
FAR = LOGITS + torch.randn(6, generator=GENERATOR, dtype=torch.float64)


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = p.log_softmax(0), q.log_softmax(0)
    return (log_p.exp() * (log_p - log_q)).sum()


def expectation(estimator: Any, reference: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Mean of the estimator over all tokens, and of its gradient with the tokens held."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    values = estimator(logprobs, reference.log_softmax(0))
    probabilities = logprobs.detach().exp()
    (gradient,) = torch.autograd.grad((probabilities * values).sum(), logits)
    return (probabilities * values.detach()).sum().item(), gradient


@pytest.mark.parametrize("estimator", [K1(), K3()], ids=["k1", "k3"])
@pytest.mark.parametrize("reference", [NEAR, FAR], ids=["near", "far"])
def test_k1_and_k3_have_no_bias(estimator: Any, reference: torch.Tensor) -> None:
    value, _ = expectation(estimator, reference)
    assert value == pytest.approx(exact_kl(LOGITS, reference).item(), rel=1e-9)


def test_k2_is_close_where_the_policies_are() -> None:
    value, _ = expectation(K2(), NEAR)
    assert value == pytest.approx(exact_kl(LOGITS, NEAR).item(), rel=2e-2)


@pytest.mark.parametrize("estimator", [K1(), K2()], ids=["k1", "k2"])
def test_k1_and_k2_have_the_gradient_of_the_kl(estimator: Any) -> None:
    logits = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(exact_kl(logits, FAR), logits)
    _, gradient = expectation(estimator, FAR)
    torch.testing.assert_close(gradient, exact)


def test_k3_has_the_gradient_of_the_other_kl() -> None:
    logits = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(exact_kl(FAR, logits), logits)
    _, gradient = expectation(K3(), FAR)
    torch.testing.assert_close(gradient, exact)


def test_k3_is_never_negative_and_exact_for_small_differences() -> None:
    delta = tensor([-1.0, -1e-9, 0.0, 1e-9, 1.0])
    values = K3()(delta, torch.zeros_like(delta))
    assert (values >= 0).all()
    assert values[0].item() == pytest.approx(2.718281828459045 - 2)


@pytest.mark.parametrize("coefficient", [0.0, -1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_not_positive_is_refused(coefficient: float) -> None:
    for make in (K1, K2, K3):
        with pytest.raises(ValueError, match=r"leave model\.objective\.reference_kl out"):
            make(coefficient)
