"""The norm of the whole gradient, against all its numbers in one vector."""

from __future__ import annotations

import math

import pytest
import torch

from logra_lightning.optim.grad_norm import clip_factor, not_finite, whole_norm


def test_the_norm_is_that_of_all_numbers_in_one_vector() -> None:
    sketched = torch.randn(5, 4, dtype=torch.float64)
    dense = {"a": torch.randn(3, 2), "b": torch.randn(7)}
    squares = {"q": sketched.square().sum(dim=1)}
    everything = torch.cat([sketched.flatten(), *(g.flatten().double() for g in dense.values())])
    norm, problem = whole_norm(squares, dense, ["q", "a", "b"])
    assert norm == pytest.approx(everything.norm().item(), rel=1e-6)
    assert problem == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_counted_and_the_last_in_forward_order_named(bad: float) -> None:
    squares = {"q": torch.tensor([1.0, bad]), "k": torch.ones(2)}
    gradients = {"a": torch.tensor([bad]), "b": torch.ones(2)}
    for order, first in ((["b", "a", "q", "k"], "q"), (["q", "k", "a", "b"], "a")):
        norm, problem = whole_norm(squares, gradients, order)
        assert math.isnan(norm)
        assert problem == (
            f"the gradient is not finite in 2 of 4 weights, in the backward pass first in {first!r}"
        )


def test_finite_gradients_are_no_problem() -> None:
    assert not_finite({"a": 1.0, "b": 1e38}, ["a", "b"]) == ""


def test_clipping_leaves_the_largest_norm_that_is_allowed() -> None:
    gradient = torch.tensor([2.0, 2.0, 2.0, 2.0])  # of norm 4
    assert (gradient * clip_factor(4.0, 1.0)).norm() == 1.0
    assert clip_factor(4.0, 4.0) == clip_factor(4.0, 5.0) == clip_factor(4.0, None) == 1.0
