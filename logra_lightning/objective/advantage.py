"""Advantages: how much better each completion is than what it is compared with.

An advantage turns the rewards [P, G] of a batch into advantages [P, G], for P prompts with G
completions each. It is called once per batch, with the rewards that all processes have sampled. For
one of your own, subclass `Advantage` and name it by `class_path`.
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
        """Turn [P, G] fp32 rewards into [P, G] fp32 advantages."""

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
        std = rewards.to(torch.float64).std(dim=1, keepdim=True)
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
        group_size = rewards.shape[1]
        return (_centered(rewards) * (group_size / (group_size - 1))).to(torch.float32)


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
        return _whitened(_centered(rewards.reshape(1, -1)), self.eps).reshape(rewards.shape)


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
        return _whitened(_centered(rewards), self.eps)


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
        mean = rewards.mean().item()
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = baseline + self.weight * (mean - baseline)
        advantages = rewards - baseline
        rounding = _rounding(rewards.abs().amax().clamp_min(abs(baseline)))
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
    where all are below 1. Rewards [[1, 0], [1, 1 + 1e-9]] give [False, True].
    """
    spread = rewards.amax(dim=1) - rewards.amin(dim=1)
    return spread <= _rounding(rewards.abs().amax(dim=1))


def _rounding(largest: Tensor) -> Tensor:
    return 1e-6 * largest.clamp_min(1.0)


def _centered(rewards: Tensor) -> Tensor:
    """[P, G] fp64 rewards minus their group's mean; exactly zero in a constant group."""
    rewards = rewards.to(torch.float64)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    return centered.masked_fill(is_constant(rewards)[:, None], 0.0)


def _whitened(centered: Tensor, eps: float) -> Tensor:
    """Divide centered values by the standard deviation of all of them together."""
    std = centered.std() if centered.numel() > 1 else torch.zeros_like(centered.sum())
    return (centered / (std + eps).clamp_min(_TINY)).to(torch.float32)


def _checked(eps: float) -> float:
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps
