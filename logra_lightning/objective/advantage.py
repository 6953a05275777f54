"""Advantages: rewards of one batch, group by group, to one number per rollout.

An advantage maps `rewards [P, G] -> advantages [P, G]`; subclass `Advantage` for one of your own
and name it by `class_path`. It sees all that was sampled for the batch, over all ranks, and is
called once per batch. One that remembers something has `state_dict` and `load_state_dict`, which
travel with checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-30  # 0 / 0 is no advantage


class Advantage(ABC):
    """How rewards become advantages.

    Attributes:
        min_group_size: smallest G with which the advantage is not always zero.
    """

    min_group_size: int = 1

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep of it; empty for an advantage that remembers nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue with what `state_dict` returned when the checkpoint was saved."""


class GRPO(Advantage):
    r"""Group-normalized advantage.

    .. math:: A_i = (r_i - \mathrm{mean}(r)) / (\mathrm{std}(r) + \epsilon)

    with mean and (unbiased) standard deviation over the G completions of one prompt. A group whose
    rewards differ by rounding only has advantage exactly zero.

    Source: DeepSeekMath, arXiv 2402.03300.

    Args:
        eps: added to the standard deviation.
    """

    min_group_size = 2

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        std = rewards.to(torch.float64).std(dim=1, keepdim=True)
        return (_centered(rewards) / (std + self.eps).clamp_min(_TINY)).to(torch.float32)


class DrGRPO(Advantage):
    r"""Group-centered advantage, :math:`A_i = r_i - \mathrm{mean}(r)`.

    Without the division, easy and hard prompts do not count more than others. The paper's loss is
    that of the normalizer `ConstantLength`.

    Source: arXiv 2503.20783.
    """

    min_group_size = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        return _centered(rewards).to(torch.float32)


class RLOO(Advantage):
    r"""Leave-one-out advantage.

    .. math:: A_i = r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j = \frac{G}{G - 1}
        (r_i - \mathrm{mean}(r))

    Source: arXiv 2402.14740.
    """

    min_group_size = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        group_size = rewards.shape[1]
        return (_centered(rewards) * (group_size / (group_size - 1))).to(torch.float32)


class ReinforcePlusPlus(Advantage):
    r"""Batch-normalized advantage, :math:`A = (r - \mathrm{mean}) / (\mathrm{std} + \epsilon)`.

    Mean and (unbiased) standard deviation are those of the whole batch; works with one completion
    per prompt.

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        eps: added to the standard deviation.
    """

    min_group_size = 1

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        return _whitened(_centered(rewards.reshape(1, -1)), self.eps).reshape(rewards.shape)


class ReinforcePlusPlusBaseline(Advantage):
    r"""Group-centered, then batch-normalized.

    .. math:: c_i = r_i - \mathrm{mean}(r), \qquad A = c / (\mathrm{std}(c) + \epsilon)

    with the mean of each group and the standard deviation of the whole batch.

    Source: REINFORCE++-baseline, arXiv 2501.03262.

    Args:
        eps: added to the standard deviation.
    """

    min_group_size = 2

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = _checked(eps)

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        return _whitened(_centered(rewards), self.eps)


class RunningBaseline(Advantage):
    r"""The reward minus a moving average of earlier batches' means: one completion is enough.

    .. math:: A = r - b, \qquad b \leftarrow b + \mathrm{weight}\, (\mathrm{mean}(r) - b)

    The first batch's baseline is its own mean.

    Source: REINFORCE with a baseline, Williams, 1992; LoGRA (arXiv 2610.06647) trains with single
    samples.

    Args:
        weight: of the newest batch in the average.

    Raises:
        ValueError: a weight out of range.
    """

    min_group_size = 1

    def __init__(self, weight: float = 0.1) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, got {weight}")
        self.weight = weight
        self.baseline: float | None = None

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages; moves the baseline."""
        rewards = rewards.to(torch.float64)
        mean = rewards.mean().item()
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = baseline + self.weight * (mean - baseline)
        advantages = rewards - baseline
        rounding = _rounding(rewards.abs().amax().clamp_min(abs(baseline)))
        return advantages.masked_fill(advantages.abs() <= rounding, 0.0).to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The baseline."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved baseline."""
        self.baseline = state["baseline"]


def is_constant(rewards: Tensor) -> Tensor:
    """[P] bool, which groups of [P, G] rewards are equal up to fp32 rounding."""
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
    """Centered values over the standard deviation of them all."""
    std = centered.std() if centered.numel() > 1 else torch.zeros_like(centered.sum())
    return (centered / (std + eps).clamp_min(_TINY)).to(torch.float32)


def _checked(eps: float) -> float:
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return eps
