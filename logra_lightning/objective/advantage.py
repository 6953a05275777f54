"""Advantages: rewards of one batch, group by group, to one number per rollout.

An advantage is a callable `rewards [P, G] -> advantages [P, G]` with an attribute
`min_group_size`; write your own and name it by `class_path`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    """How rewards become advantages.

    Attributes:
        min_group_size: smallest G with which the advantage is not always zero.
    """

    min_group_size: int

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        ...


class GRPO:
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
        if eps < 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        self.eps = eps

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, G] fp32 rewards to [P, G] fp32 advantages."""
        rewards = rewards.to(torch.float64)
        centered = rewards - rewards.mean(dim=1, keepdim=True)
        std = rewards.std(dim=1, keepdim=True)
        advantages = centered / (std + self.eps)
        return advantages.masked_fill(is_constant(rewards)[:, None], 0.0).to(torch.float32)


def is_constant(rewards: Tensor) -> Tensor:
    """[P] bool, which groups of [P, G] rewards are equal up to fp32 rounding."""
    spread = rewards.amax(dim=1) - rewards.amin(dim=1)
    return spread <= 1e-6 * rewards.abs().amax(dim=1).clamp_min(1.0)
