"""What a batch of rollouts looks like, as numbers to plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from logra_lightning.objective.advantage import is_constant
from logra_lightning.types import Rollouts


def rollout_stats(rollouts: Rollouts, group_size: int) -> dict[str, float]:
    """Metric name to value.

    Args:
        rollouts: B = P * G rollouts, those of one prompt standing together.
        group_size: G.

    Returns:
        `rollout/reward` and `rollout/length` (means), `rollout/length_min` and `length_max`,
        `rollout/reward_std` (within a group), `rollout/zero_variance_frac` (share of groups with
        equal rewards), `rollout/truncated_frac`, `rollout/tokens` (completion tokens), and
        `rewards/<name>` (mean where the term applies).
    """
    lengths = rollouts.lengths.to(torch.float32)
    groups = rollouts.rewards.view(-1, group_size)
    stats = {
        "rollout/reward": rollouts.rewards.mean(),
        "rollout/reward_std": groups.std(dim=1, correction=0).mean(),
        "rollout/zero_variance_frac": is_constant(groups).to(torch.float32).mean(),
        "rollout/length": lengths.mean(),
        "rollout/length_min": lengths.min(),
        "rollout/length_max": lengths.max(),
        "rollout/truncated_frac": rollouts.truncated.to(torch.float32).mean(),
        "rollout/tokens": lengths.sum(),
    }
    for name, values in rollouts.rewards_by_name.items():
        if not values.isnan().all():
            stats[f"rewards/{name}"] = values.nanmean()
    return {name: value.item() for name, value in stats.items()}


def merged_metrics(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Means of several parts as one: `(size, tag to mean)` to tag to the mean weighted by size."""
    merged = {}
    for name in {name: None for _, metrics in parts for name in metrics}:
        known = [(size, metrics[name]) for size, metrics in parts if name in metrics]
        total = sum(size for size, _ in known)
        merged[name] = math.fsum(size * value for size, value in known) / total
    return merged
