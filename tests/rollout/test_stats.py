"""Statistics of rollouts against means taken by hand."""

from __future__ import annotations

import math

import pytest
import torch

from logra_lightning.rollout.stats import merged_metrics, rollout_stats
from logra_lightning.types import Completion, Rollouts


def test_stats_of_two_groups() -> None:
    completions = [Completion([1] * n, torch.zeros(n), truncated=n == 4) for n in (1, 2, 3, 4)]
    completions[3].logprobs[1:3] = math.nan
    rollouts = Rollouts(
        prompt_ids=[[1]] * 4,
        completions=completions,
        rewards=torch.tensor([0.0, 2.0, 1.0, 1.0]),
        rewards_by_name={
            "a": torch.tensor([math.nan, 1.0, 2.0, 6.0]),
            "never": torch.full((4,), math.nan),
        },
        advantages=torch.tensor([-1.0, 1.0, 0.0, 0.0]),
    )
    assert rollout_stats(rollouts, 2) == pytest.approx(
        {
            "rollout/reward": 1.0,
            "rollout/unscored_frac": 0.0,
            "rollout/reward_std": 0.5,  # (1 + 0) / 2
            "rollout/length": 2.5,
            "rollout/truncated_frac": 0.25,
            "rollout/zero_variance_frac": 0.5,
            "rollout/length_min": 1.0,
            "rollout/length_max": 4.0,
            "rollout/samples": 4.0,
            "rollout/tokens": 10.0,
            "mismatch/invalid_tokens": 2.0,
            "rewards/a": 3.0,
        }
    )


def unscored(rewards: list[float]) -> dict[str, float]:
    completions = [Completion([1], torch.zeros(1), truncated=False) for _ in rewards]
    values = torch.tensor(rewards)
    zeros = torch.zeros(len(rewards))
    prompts = [[1]] * len(rewards)
    return rollout_stats(Rollouts(prompts, completions, values, {"a": values}, zeros), 2)


def test_means_leave_out_what_no_reward_applies_to() -> None:
    nan = math.nan
    stats = unscored([3.0, nan, nan, nan, 1.0, 2.0, 4.0, 4.0])
    assert stats["rollout/reward"] == stats["rewards/a"] == pytest.approx(14 / 5)
    assert stats["rollout/unscored_frac"] == 3 / 8
    assert stats["rollout/reward_std"] == pytest.approx(0.5 / 4)
    assert stats["rollout/zero_variance_frac"] == 3 / 4
    none = unscored([nan, nan])
    assert none["rollout/unscored_frac"] == 1.0
    assert not {"rollout/reward", "rewards/a"} & none.keys()
    assert all(map(math.isfinite, none.values()))


def test_the_mean_reward_of_several_samples_is_that_of_the_scored_ones() -> None:
    parts = [unscored([3.0, math.nan]), unscored([1.0, 2.0]), unscored([math.nan] * 2)]
    merged = merged_metrics(parts)
    assert merged["rollout/reward"] == pytest.approx(2.0)
    assert merged["rollout/unscored_frac"] == pytest.approx(0.5)


def test_metrics_of_several_samples_are_those_of_one() -> None:
    first = {"rollout/samples": 3.0, "a": 1.0, "b": 5.0, "x_min": 1.0, "x_max": 2.0}
    second = {"rollout/samples": 1.0, "a": 5.0, "x_min": 0.5, "x_max": 1.5}
    assert merged_metrics([first, second]) == pytest.approx(
        {"rollout/samples": 4.0, "a": 2.0, "b": 5.0, "x_min": 0.5, "x_max": 2.0}
    )
