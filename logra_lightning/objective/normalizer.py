"""Normalizers: how much each token counts in the loss of a step.

The weights depend on the lengths of rollouts and on counts of the whole optimizer step, over all
processes. So it changes nothing how a batch is cut into microbatches or shared among processes. For
one of your own, subclass `Normalizer` and name it by `class_path`.

Two rollouts of 1 and 3 tokens, for instance, get these weights for each of their tokens:

| normalizer | 1 token | 3 tokens | the sum over all 4 tokens is |
|---|---|---|---|
| `TokenMean` | 1/4 | 1/4 | the mean over tokens |
| `SequenceMean` | 1/2 | 1/6 | the mean over rollouts of their means |
| `ConstantLength(5)` | 1/10 | 1/10 | the mean over rollouts of their sums divided by 5 |
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Normalizer(ABC):
    """How the losses of tokens become the loss of a step."""

    @abstractmethod
    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """Return one weight per rollout; each of its tokens has this weight in the step's loss.

        Args:
            lengths: [B] int64, the number of trained tokens of each of B rollouts of the step.
            num_tokens: how many tokens all processes together train in the step.
            num_rollouts: how many rollouts all processes together train in the step.

        Returns:
            [B] fp64 weights.
        """


class TokenMean(Normalizer):
    r"""The mean over all tokens of the step, :math:`w = 1 / \sum_i n_i`.

    Every token counts the same, so long rollouts count more than short ones.

    Source: DAPO, arXiv 2503.14476.
    """

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, see `Normalizer`."""
        return torch.full_like(lengths, 1 / max(num_tokens, 1), dtype=torch.float64)


class SequenceMean(Normalizer):
    r"""The mean over rollouts of their own means, :math:`w_i = 1 / (B n_i)`.

    Every rollout counts the same, so a token of a long one counts less.

    Source: GRPO, arXiv 2402.03300.
    """

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, see `Normalizer`."""
        return 1 / (num_rollouts * lengths.to(torch.float64))


class ConstantLength(Normalizer):
    r"""The mean over rollouts of their sums divided by a constant.

    .. math:: w = 1 / (B\, \mathrm{length})

    A token counts the same whether its rollout is long or short, and whatever the lengths of the
    other rollouts in the step.

    Source: Dr.GRPO, arXiv 2503.20783.

    Args:
        length: number of tokens to divide by; usually `model.sampling.max_tokens`.

    Raises:
        ValueError: the length is below 1.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.length = length

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, see `Normalizer`."""
        weight = 1 / (max(num_rollouts, 1) * self.length)
        return torch.full_like(lengths, weight, dtype=torch.float64)
