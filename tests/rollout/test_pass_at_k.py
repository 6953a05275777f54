"""pass@k, avg@n and maj@n equal their textbook formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from logra_lightning.rollout.pass_at_k import average_at_n, majority_at_n, pass_at_k


def with_successes(c: int, n: int) -> torch.Tensor:
    """[1, n] bool, the first c true."""
    return (torch.arange(n) < c).view(1, n)


def exact(n: int, c: int, k: int) -> float:
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


@pytest.mark.parametrize("k", [1, 2, 10, 500, 999, 1000])
def test_pass_at_k_is_exact_for_a_thousand_completions(k: int) -> None:
    for c in (0, 1, 2, 10, 499, 500, 501, 990, 999, 1000):
        value = pass_at_k(with_successes(c, 1000), k).item()
        assert value == pytest.approx(exact(1000, c, k), rel=1e-12, abs=1e-15), c


def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_success() -> None:
    successes = torch.tensor([[False, True, False, True, False]])
    draws = [any(draw) for draw in combinations(successes[0].tolist(), 3)]
    assert pass_at_k(successes, 3).item() == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_taken_prompt_by_prompt() -> None:
    values = pass_at_k(torch.tensor([[True, False, False], [False, False, False]]), 2)
    assert values.tolist() == pytest.approx([2 / 3, 0.0])  # 1 - C(2,2)/C(3,2), and 0


def test_more_tries_than_completions_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="got k=8 and 4 completions"):
        pass_at_k(torch.ones(2, 4, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match="got k=0 and 4 completions"):
        pass_at_k(torch.ones(2, 4, dtype=torch.bool), 0)


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.ones(3) > 0, torch.ones(2, 0) > 0])
def test_what_is_not_a_table_of_successes_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[prompts, completions\] bool"):
        average_at_n(bad)


def test_the_average_is_the_share_of_a_prompts_completions() -> None:
    assert average_at_n(torch.tensor([[True, False], [True, True]])).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("answers", "successes", "expected"),
    [
        (["4", "5", "4"], [True, False, True], 1.0),
        (["5", "5", "4"], [False, False, True], 0.0),
        (["5", "4", "4", "5"], [False, True, True, False], 0.0),  # of equals the first
        (["4", "5", "5", "4"], [True, False, False, True], 1.0),
        ([None, None, "4"], [False, False, True], 1.0),  # None has no vote
        ([None, None], [True, True], 0.0),
        (["4", "4", "4", "5"], [True, False, True, False], 2 / 3),  # the answer alone is not all
    ],
)
def test_the_majority_is_right_or_wrong(
    answers: Sequence[str | None], successes: list[bool], expected: float
) -> None:
    assert majority_at_n(torch.tensor([successes]), [answers]).item() == pytest.approx(expected)


def test_the_majority_needs_an_answer_or_none_for_each_completion() -> None:
    found = majority_at_n(torch.tensor([[True, False], [False, True]]), [["1", "2"], ["1", "2"]])
    assert found.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"2 completions of 1 prompts, got lists of \[1\]"):
        majority_at_n(torch.tensor([[True, False]]), [["1"]])
