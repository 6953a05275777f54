"""Advantages: how much better each completion is than what it is compared with.

An advantage turns the rewards [P, G] of a batch into advantages [P, G], for P prompts with G
completions each. It is called once per batch, with the rewards that all processes have sampled. For
one of your own, subclass `Advantage` and name it by `class_path`.

A completion to which no reward applies has the reward NaN. It takes no part in the mean and the
standard deviation of its group, and its advantage is 0: with `GRPO`, rewards [1, 0, NaN] have the
advantages of [1, 0], and 0 for the third completion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-30  # with eps 0, a constant group would be 0 / 0


class Advantage(ABC):
    """How rewards become advantages.

    Attributes:
        min_group_size: the smallest G that makes sense; with fewer completions per prompt every
            advantage would be zero.
    """

    min_group_size: int = 1

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages.

        A reward is NaN where none applies. What is returned there does not count, all other
        advantages must be finite.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep; empty for an advantage that remembers nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue with what `state_dict` returned when the checkpoint was saved."""


class GRPO(Advantage):
    r"""Rewards minus the mean of their group, divided by the group's standard deviation.

    .. math:: A_i = (r_i - \mathrm{mean}(r)) / (\mathrm{std}(r) + \epsilon)

    The mean and the (unbiased) standard deviation are taken over the G completions of one prompt.
    Rewards [1, 0, 0, 0], for instance, have mean .25 and standard deviation .5, so their advantages
    are [1.5, -.5, -.5, -.5]. A group whose rewards differ by rounding only has advantages of
    exactly zero.

    Source: DeepSeekMath, arXiv 2402.03300.

    Args:
        eps: number added to the standard deviation; at least 0.
    """

    min_group_size = 2

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""
        std = group_std(rewards.to(torch.float64), correction=1)
        return (_centered(rewards) / (std + self.eps).clamp_min(_TINY)).to(torch.float32)


class DrGRPO(Advantage):
    r"""Rewards minus the mean of their group, :math:`A_i = r_i - \mathrm{mean}(r)`.

    Rewards [1, 0, 0, 0] have the advantages [.75, -.25, -.25, -.25]. `GRPO` divides them by a
    standard deviation that is small for very easy and very hard prompts, so that these count more;
    here they do not. The paper uses it with the normalizer `ConstantLength`.

    Source: arXiv 2503.20783.
    """

    min_group_size = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""
        return _centered(rewards).to(torch.float32)


class RLOO(Advantage):
    r"""Each reward minus the mean of the others in its group (leave one out).

    .. math:: A_i = r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j = \frac{G}{G - 1}
        (r_i - \mathrm{mean}(r))

    Rewards [1, 0, 0, 0] have the advantages [1, -1/3, -1/3, -1/3].

    Source: arXiv 2402.14740.
    """

    min_group_size = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""
        count = _num_scored(rewards)
        return (_centered(rewards) * (count / (count - 1).clamp_min(1))).to(torch.float32)


class ReinforcePlusPlus(Advantage):
    r"""Rewards normalized over the whole batch.

    .. math:: A = (r - \mathrm{mean}) / (\mathrm{std} + \epsilon)

    The mean and the (unbiased) standard deviation are taken over all rewards of the batch, so one
    completion per prompt is enough.

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        eps: number added to the standard deviation; at least 0.
    """

    min_group_size = 1

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""
        centered = _centered(rewards.reshape(1, -1)).reshape(rewards.shape)
        return _whitened(centered, ~rewards.isnan(), self.eps)


class ReinforcePlusPlusBaseline(Advantage):
    r"""Rewards minus the mean of their group, divided by one standard deviation for the batch.

    .. math:: c_i = r_i - \mathrm{mean}(r), \qquad A = c / (\mathrm{std}(c) + \epsilon)

    The mean is taken over each group, the (unbiased) standard deviation over the whole batch.

    Source: REINFORCE++-baseline, arXiv 2501.03262.

    Args:
        eps: number added to the standard deviation; at least 0.
    """

    min_group_size = 2

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""
        return _whitened(_centered(rewards), ~rewards.isnan(), self.eps)


class RunningBaseline(Advantage):
    r"""Rewards minus a baseline b, which is a moving average of the batches' mean rewards.

    .. math:: A = r - b, \qquad b \leftarrow b + \mathrm{weight}\, (\mathrm{mean}(r) - b)

    The baseline of the first batch is that batch's own mean. With weight .25, a first batch with
    mean 2 leaves b = 2; a second one with mean 6 is compared with 2, and leaves b = 3. One
    completion per prompt is enough.

    Source: REINFORCE with a baseline, Williams, 1992; LoGRA (arXiv 2610.06647) trains with single
    samples.

    Args:
        weight: share of the newest batch in the average; above 0 and at most 1.

    Raises:
        ValueError: the weight is out of range.
    """

    min_group_size = 1

    def __init__(self, weight: float = 0.1) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, got {weight}")
        self.weight = weight
        self.baseline: float | None = None

    def __call__(self, rewards: Tensor) -> Tensor:
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages, and move the baseline."""
        rewards = rewards.to(torch.float64)
        scored = rewards[~rewards.isnan()]
        if len(scored) == 0:  # nothing to learn from, and the baseline stays
            return torch.zeros_like(rewards, dtype=torch.float32)
        mean = scored.mean().item()
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = baseline + self.weight * (mean - baseline)
        advantages = (rewards - baseline).nan_to_num(0.0)
        rounding = _rounding(scored.abs().amax().clamp_min(abs(baseline)))
        return advantages.masked_fill(advantages.abs() <= rounding, 0.0).to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The baseline, None before the first batch."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved baseline."""
        self.baseline = state.get("baseline")


def is_constant(rewards: Tensor) -> Tensor:
    """[P] bool, True for each group of [P, G] rewards in which all are equal up to rounding.

    Rewards count as equal when they differ by at most 1e-6 times the largest of them, or by 1e-6
    where all are below 1. Rewards [[1, 0], [1, 1 + 1e-9]] give [False, True]. Those that are NaN do
    not count, so a group with fewer than two others is constant.
    """
    unscored = rewards.isnan()
    largest = rewards.masked_fill(unscored, -torch.inf).amax(dim=1)
    smallest = rewards.masked_fill(unscored, torch.inf).amin(dim=1)
    return largest - smallest <= _rounding(rewards.nan_to_num(0.0).abs().amax(dim=1))


def group_std(rewards: Tensor, *, correction: int) -> Tensor:
    """[P, 1] standard deviation of each group of [P, G] rewards.

    Rewards that are NaN do not count; it is 0 for a group with fewer than two others.

    Args:
        rewards: [P, G], fp32 or fp64.
        correction: 1 for the unbiased standard deviation, 0 for that of the rewards themselves.
    """
    unscored = rewards.isnan()
    if rewards.shape[1] == 1:
        return torch.zeros_like(rewards)
    std = rewards.std(dim=1, keepdim=True, correction=correction)
    for i in unscored.any(dim=1).nonzero()[:, 0].tolist():
        scored = rewards[i][~unscored[i]]
        std[i] = scored.std(correction=correction) if len(scored) > 1 else 0.0
    return std


def _rounding(largest: Tensor) -> Tensor:
    return 1e-6 * largest.clamp_min(1.0)


def _num_scored(rewards: Tensor) -> Tensor:
    """[P, 1] fp64, the number of rewards of each group that are not NaN."""
    return (~rewards.isnan()).sum(dim=1, keepdim=True).to(torch.float64)


def _centered(rewards: Tensor) -> Tensor:
    """[P, G] fp64 rewards minus their group's mean; exactly 0 in a constant group and for NaN."""
    rewards = rewards.to(torch.float64)
    mean = rewards.nan_to_num(0.0).sum(dim=1, keepdim=True) / _num_scored(rewards).clamp_min(1)
    centered = (rewards - mean).nan_to_num(0.0)
    return centered.masked_fill(is_constant(rewards)[:, None], 0.0)


def _whitened(centered: Tensor, scored: Tensor, eps: float) -> Tensor:
    """Divide centered values by the standard deviation of all those that are scored."""
    values = centered[scored]
    std = values.std() if len(values) > 1 else torch.zeros_like(centered.sum())
    return (centered / (std + eps).clamp_min(_TINY)).to(torch.float32)


def _checked(eps: float) -> float:
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps
