"""`rollout_stats`: what a batch of rollouts looks like, as numbers to plot."""

from __future__ import annotations

import torch

from logra_lightning.types import Rollouts


def rollout_stats(rollouts: Rollouts, group_size: int) -> dict[str, float]:
    """Metric name to value.

    Args:
        rollouts: B = P * G rollouts, those of one prompt standing together.
        group_size: G.

    Returns:
        `rollout/reward` and `rollout/length` (means), `rollout/reward_std` (within a group),
        `rollout/zero_advantage_frac` (share of rollouts that teach nothing),
        `rollout/truncated_frac`, `rollout/tokens` (completion tokens), and `rewards/<name>`
        (mean where the term applies).
    """
    lengths = rollouts.lengths.to(torch.float32)
    groups = rollouts.rewards.view(-1, group_size)
    stats = {
        "rollout/reward": rollouts.rewards.mean(),
        "rollout/reward_std": groups.std(dim=1, correction=0).mean(),
        "rollout/length": lengths.mean(),
        "rollout/truncated_frac": rollouts.truncated.to(torch.float32).mean(),
        "rollout/zero_advantage_frac": (rollouts.advantages == 0).to(torch.float32).mean(),
        "rollout/tokens": lengths.sum(),
    }
    for name, values in rollouts.rewards_by_name.items():
        if not values.isnan().all():
            stats[f"rewards/{name}"] = values.nanmean()
    return {name: value.item() for name, value in stats.items()}
