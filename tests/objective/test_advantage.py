"""GRPO's advantage against its formula, and groups without signal (case 15)."""

from __future__ import annotations

import statistics

import pytest
import torch

from logra_lightning.objective import GRPO


def test_equals_the_formula_written_out() -> None:
    groups = [[0.0, 1.0, 1.0, 3.5], [-2.0, 0.1, 0.2, 0.3]]
    expected = [
        [(r - statistics.mean(g)) / (statistics.stdev(g) + 0.01) for r in g] for g in groups
    ]
    actual = GRPO(eps=0.01)(torch.tensor(groups))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected))


@pytest.mark.parametrize(
    "group",
    [[1, 1, 1, 1], [0, 0, 0, 0], [0.3, 0.3, 0.3, 0.3], [1, 1, 1, 1 + 1e-9], [1e6 + 0.1] * 4],
)
def test_a_group_that_differs_by_rounding_has_advantage_exactly_zero(group: list[float]) -> None:
    # In fp64, so that 1 + 1e-9 is not 1 before the advantage sees it.
    assert (GRPO()(torch.tensor([group], dtype=torch.float64)) == 0).all()


def test_one_different_completion_is_signal_for_the_whole_group() -> None:
    advantages = GRPO()(torch.tensor([[0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95]]))
    assert (advantages != 0).all()


def test_negative_eps_is_refused() -> None:
    with pytest.raises(ValueError, match="eps must not be negative"):
        GRPO(eps=-1.0)
