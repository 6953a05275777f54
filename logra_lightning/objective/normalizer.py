"""Normalizers: how much each token counts in the loss of a step.

Weights follow from lengths and from counts of the whole optimizer step over all ranks, so cutting
the batch into other microbatches or ranks changes nothing. Subclass `Normalizer` for one of your
own and name it by `class_path`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Normalizer(ABC):
    """How a loss of tokens becomes a loss of the step."""

    @abstractmethod
    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """The weight that each token of a rollout has in the sum.

        Args:
            lengths: [B] int64, trained tokens of some rollouts of the step.
            num_tokens: trained tokens of the step, over all ranks.
            num_rollouts: rollouts that are trained in the step, over all ranks.

        Returns:
            [B] fp64.
        """


class TokenMean(Normalizer):
    r"""The mean over all tokens of the step, :math:`w = 1 / \sum_i n_i`: each counts the same.

    Source: DAPO, arXiv 2503.14476.
    """

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, as in `Normalizer`."""
        return torch.full_like(lengths, 1 / max(num_tokens, 1), dtype=torch.float64)


class SequenceMean(Normalizer):
    r"""The mean over rollouts of their means, :math:`w_i = 1 / (B n_i)`: each counts the same.

    Source: GRPO, arXiv 2402.03300.
    """

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, as in `Normalizer`."""
        return 1 / (num_rollouts * lengths.to(torch.float64))


class ConstantLength(Normalizer):
    r"""The sum of each rollout over a constant, :math:`w = 1 / (B\, \mathrm{length})`.

    With it neither length nor step changes how much a token counts.

    Source: Dr.GRPO, arXiv 2503.20783.

    Args:
        length: usually `model.sampling.max_tokens`.

    Raises:
        ValueError: a length below 1.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.length = length

    def __call__(self, lengths: Tensor, num_tokens: int, num_rollouts: int) -> Tensor:
        """[B] fp64 weights, as in `Normalizer`."""
        weight = 1 / (max(num_rollouts, 1) * self.length)
        return torch.full_like(lengths, weight, dtype=torch.float64)
