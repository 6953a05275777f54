"""Advantages against their formulas, and groups without signal."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from logra_lightning.objective import (
    GRPO,
    RLOO,
    Advantage,
    DrGRPO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RunningBaseline,
)
from logra_lightning.objective.advantage import is_constant

GROUPS = [[0.0, 1.0, 1.0, 3.5], [-2.0, 0.1, 0.2, 0.3]]
FLAT = [r for group in GROUPS for r in group]
BY_GROUP = [GRPO(), DrGRPO(), RLOO(), ReinforcePlusPlusBaseline()]


def of(advantage: Advantage, groups: Any = GROUPS) -> list[list[float]]:
    values = advantage(torch.tensor(groups))
    assert values.dtype == torch.float32
    return values.tolist()


def approx(groups: list[list[float]]) -> Any:
    return [pytest.approx(group, rel=1e-5, abs=1e-6) for group in groups]


def test_grpo_equals_the_formula_written_out() -> None:
    expected = [
        [(r - statistics.mean(g)) / (statistics.stdev(g) + 0.01) for r in g] for g in GROUPS
    ]
    assert of(GRPO(eps=0.01)) == approx(expected)


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    assert of(DrGRPO()) == approx([[r - statistics.mean(g) for r in g] for g in GROUPS])


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    expected = [[g[i] - statistics.mean(g[:i] + g[i + 1 :]) for i in range(4)] for g in GROUPS]
    assert of(RLOO()) == approx(expected)


def test_reinforce_plus_plus_normalizes_over_the_batch() -> None:
    mean, std = statistics.mean(FLAT), statistics.stdev(FLAT)
    expected = [[(r - mean) / (std + 0.01) for r in g] for g in GROUPS]
    assert of(ReinforcePlusPlus(eps=0.01)) == approx(expected)
    one_each = [[r] for r in FLAT]
    assert of(ReinforcePlusPlus(eps=0.01), one_each) == approx([[x] for g in expected for x in g])


def test_reinforce_plus_plus_baseline_centers_by_group_and_scales_by_batch() -> None:
    centered = [[r - statistics.mean(g) for r in g] for g in GROUPS]
    std = statistics.stdev([x for g in centered for x in g])
    expected = [[x / (std + 0.01) for x in g] for g in centered]
    assert of(ReinforcePlusPlusBaseline(eps=0.01)) == approx(expected)


def test_running_baseline_is_a_moving_average_that_a_checkpoint_carries() -> None:
    advantage = RunningBaseline(weight=0.25)
    assert of(advantage, [[1.0], [3.0]]) == [[-1.0], [1.0]]  # its own mean, 2
    resumed = RunningBaseline(weight=0.25)
    resumed.load_state_dict(advantage.state_dict())
    for run in (advantage, resumed):
        assert of(run, [[4.0], [8.0]]) == [[2.0], [6.0]]  # the baseline is still 2
        assert of(run, [[3.0], [3.0]]) == [[0.0], [0.0]]  # 2 + (6 - 2) / 4
        assert run.baseline == 3.0


def test_an_advantage_that_remembers_nothing_adds_nothing_to_a_checkpoint() -> None:
    advantage = GRPO()
    assert advantage.state_dict() == {}
    advantage.load_state_dict({})
    assert of(advantage, [[1.0, 1.0]]) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "group",
    [[1, 1, 1, 1], [0, 0, 0, 0], [0.3, 0.3, 0.3, 0.3], [1, 1, 1, 1 + 1e-9], [1e6 + 0.1] * 4],
)
@pytest.mark.parametrize(
    "advantage",
    [*BY_GROUP, ReinforcePlusPlus(), RunningBaseline()],
    ids=lambda a: type(a).__name__,
)
def test_rewards_that_differ_by_rounding_have_advantage_exactly_zero(
    advantage: Advantage, group: list[float]
) -> None:
    # In fp64, so that 1 + 1e-9 is not 1 before the advantage sees it.
    if isinstance(advantage, RunningBaseline):
        advantage = RunningBaseline()
    assert (advantage(torch.tensor([group], dtype=torch.float64)) == 0).all()


@pytest.mark.parametrize("advantage", BY_GROUP, ids=lambda a: type(a).__name__)
def test_one_different_completion_is_signal_for_the_whole_group(advantage: Advantage) -> None:
    advantages = advantage(torch.tensor([[0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95]]))
    assert (advantages != 0).all()


def test_a_single_rollout_has_no_signal_in_a_batch_of_one() -> None:
    assert of(ReinforcePlusPlus(), [[3.0]]) == [[0.0]]


NAN = math.nan


@pytest.mark.parametrize(
    "make",
    [GRPO, DrGRPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, RunningBaseline],
)
def test_unscored_completions_count_in_no_mean_and_have_no_advantage(make: Any) -> None:
    # Two groups of three, with an unscored completion each, are two groups of two.
    gaps = of(make(), [[NAN, 0.0, 3.5], [2.0, NAN, -1.0]])
    without = of(make(), [[0.0, 3.5], [2.0, -1.0]])
    assert gaps[0][0] == gaps[1][1] == 0.0
    assert [[gaps[0][1], gaps[0][2]], [gaps[1][0], gaps[1][2]]] == approx(without)
    # A group with one scored completion or none has nothing to be compared with.
    lonely = of(make(), [[NAN, NAN, NAN], [NAN, NAN, NAN]])
    assert lonely == [[0.0] * 3] * 2
    if make.min_group_size == 2:
        assert of(make(), [[NAN, 5.0, NAN], [1.0, 2.0, 3.0]])[0] == [0.0] * 3


def test_a_batch_without_rewards_leaves_the_running_baseline_as_it_is() -> None:
    advantage = RunningBaseline(weight=0.25)
    of(advantage, [[NAN, NAN]])
    assert advantage.baseline is None
    of(advantage, [[1.0, 3.0]])
    of(advantage, [[NAN, NAN]])
    assert advantage.baseline == 2.0


def test_unscored_rewards_make_no_group_differ() -> None:
    rewards = torch.tensor([[NAN, 1.0], [NAN, NAN]])
    assert is_constant(rewards).tolist() == [True, True]
    three = torch.tensor([[NAN, 1.0, 2.0], [1.0, NAN, 1.0]])
    assert is_constant(three).tolist() == [False, True]


def test_options_out_of_range_are_refused() -> None:
    for make in (GRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline):
        with pytest.raises(ValueError, match="eps must not be negative"):
            make(eps=-1.0)
    for weight in (0.0, 1.5):
        with pytest.raises(ValueError, match="weight must be above 0"):
            RunningBaseline(weight)
