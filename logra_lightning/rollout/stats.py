"""Numbers to plot that describe a batch of rollouts, and the merging of those of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from logra_lightning.objective.advantage import group_std, is_constant
from logra_lightning.types import Rollouts

_COUNTS = (
    "rollout/samples",
    "rollout/tokens",
    "rollout/dropped_groups",
    "rollout/refills",
    "mismatch/invalid_tokens",
)
_COUNT_ENDS = ("/errors", "/timeouts", "/worker_errors")


def rollout_stats(rollouts: Rollouts, group_size: int) -> dict[str, float]:
    """Describe a batch of rollouts by numbers.

    Args:
        rollouts: B = P * G rollouts, in which those of one prompt stand together.
        group_size: G, the number of completions per prompt.

    Returns:
        Metric name to value: `rollout/reward` (mean over the completions to which any reward
        applies; left out where there are none), `rollout/unscored_frac` (share of the others),
        `rollout/length` (mean over completions), `rollout/length_min` and `rollout/length_max`,
        `rollout/reward_std` (standard deviation within a group, mean over groups),
        `rollout/zero_variance_frac` (share of groups in which all rewards are equal),
        `rollout/truncated_frac` (share of completions that were cut off), `rollout/samples` (number
        of completions), `rollout/tokens` (number of their tokens), `mismatch/invalid_tokens`
        (number of those without a finite logprob of the engine), and `rewards/<name>` (mean of each
        reward, over the completions that it applies to).
    """
    lengths = rollouts.lengths.to(torch.float32)
    groups = rollouts.rewards.view(-1, group_size)
    unscored = rollouts.rewards.isnan()
    stats = {
        "rollout/reward": rollouts.rewards[~unscored].mean(),
        "rollout/reward_std": group_std(groups, correction=0).mean(),
        "rollout/unscored_frac": unscored.to(torch.float32).mean(),
        "rollout/zero_variance_frac": is_constant(groups).to(torch.float32).mean(),
        "rollout/length": lengths.mean(),
        "rollout/length_min": lengths.min(),
        "rollout/length_max": lengths.max(),
        "rollout/truncated_frac": rollouts.truncated.to(torch.float32).mean(),
        "rollout/samples": torch.tensor(float(len(rollouts))),
        "rollout/tokens": lengths.sum(),
        "mismatch/invalid_tokens": lengths.sum() - rollouts.trained_lengths.sum(),
    }
    for name, values in rollouts.rewards_by_name.items():
        stats[f"rewards/{name}"] = values.nanmean()
    return {name: value.item() for name, value in stats.items() if not value.isnan()}


def merged_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of several sets of rollouts into those of all of them together.

    Counts (such as `rollout/tokens`) are added. Of metrics that end in `_min` or `_max` the
    smallest or largest is kept. All others are means, weighted by `rollout/samples`: a reward of 1
    over 8 rollouts and of 4 over 4 rollouts make a reward of 2 over 12. In `rollout/reward`, only
    rollouts count to which a reward applies.
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
            if name == "rollout/reward":
                unscored = [part.get("rollout/unscored_frac", 0.0) for part in known]
                sizes = [size * (1 - u) for size, u in zip(sizes, unscored, strict=True)]
            weighted = (v * size for v, size in zip(values, sizes, strict=True))
            merged[name] = math.fsum(weighted) / math.fsum(sizes)
    return merged
