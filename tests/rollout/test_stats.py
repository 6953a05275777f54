"""rollout_stats against means taken by hand."""

from __future__ import annotations

import math

import pytest
import torch

from logra_lightning.rollout import rollout_stats
from logra_lightning.types import Completion, Rollouts


def test_stats_of_two_groups() -> None:
    completions = [Completion([1] * n, torch.zeros(n), truncated=n == 4) for n in (1, 2, 3, 4)]
    rollouts = Rollouts(
        prompt_ids=[[1]] * 4,
        completions=completions,
        rewards=torch.tensor([0.0, 2.0, 1.0, 1.0]),
        rewards_by_name={
            "a": torch.tensor([math.nan, 1.0, 2.0, 6.0]),
            "never": torch.full((4,), math.nan),
        },
        advantages=torch.tensor([-1.0, 1.0, 0.0, 0.0]),
        num_completion_tokens=10,
    )
    assert rollout_stats(rollouts, 2) == pytest.approx(
        {
            "rollout/reward": 1.0,
            "rollout/reward_std": 0.5,  # (1 + 0) / 2
            "rollout/length": 2.5,
            "rollout/truncated_frac": 0.25,
            "rollout/zero_advantage_frac": 0.5,
            "rollout/tokens": 10.0,
            "rewards/a": 3.0,
        }
    )
