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


def test_metrics_of_several_samples_are_those_of_one() -> None:
    first = {"rollout/samples": 3.0, "a": 1.0, "b": 5.0, "x_min": 1.0, "x_max": 2.0}
    second = {"rollout/samples": 1.0, "a": 5.0, "x_min": 0.5, "x_max": 1.5}
    assert merged_metrics([first, second]) == pytest.approx(
        {"rollout/samples": 4.0, "a": 2.0, "b": 5.0, "x_min": 0.5, "x_max": 2.0}
    )
