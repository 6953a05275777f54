"""What a batch of rollouts looks like, as numbers to plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from logra_lightning.objective.advantage import is_constant
from logra_lightning.types import Rollouts

_COUNTS = ("rollout/samples", "rollout/tokens", "rollout/dropped_groups", "rollout/refills")
_COUNT_ENDS = ("/errors", "/timeouts", "/worker_errors")


def rollout_stats(rollouts: Rollouts, group_size: int) -> dict[str, float]:
    """Metric name to value.

    Args:
        rollouts: B = P * G rollouts, those of one prompt standing together.
        group_size: G.

    Returns:
        `rollout/reward` and `rollout/length` (means), `rollout/length_min` and `length_max`,
        `rollout/reward_std` (within a group), `rollout/zero_variance_frac` (share of groups with
        equal rewards), `rollout/truncated_frac`, `rollout/samples` and `rollout/tokens`
        (completions and their tokens), and `rewards/<name>` (mean where the term applies).
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
        "rollout/samples": torch.tensor(float(len(rollouts))),
        "rollout/tokens": lengths.sum(),
    }
    for name, values in rollouts.rewards_by_name.items():
        if not values.isnan().all():
            stats[f"rewards/{name}"] = values.nanmean()
    return {name: value.item() for name, value in stats.items()}


def merged_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several samples as those of one.

    Counts are added, `_min` and `_max` are extremes, all others means weighted by
    `rollout/samples`.
    """
    merged: dict[str, float] = {}
    for name in {name: None for part in parts for name in part}:
        known = [part for part in parts if name in part]
        values = [part[name] for part in known]
        if name in _COUNTS or name.endswith(_COUNT_ENDS):
            merged[name] = math.fsum(values)
        elif name.endswith(("_min", "_max")):
            merged[name] = min(values) if name.endswith("_min") else max(values)
        else:
            sizes = [part["rollout/samples"] for part in known]
            weighted = (v * size for v, size in zip(values, sizes, strict=True))
            merged[name] = math.fsum(weighted) / math.fsum(sizes)
    return merged
