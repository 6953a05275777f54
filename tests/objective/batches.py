"""Microbatches in fp64, made of plain lists, for tests of the objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logra_lightning.types import Microbatch


def tensor(values: Sequence[float], *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def microbatch(
    advantages: Sequence[float], lengths: Sequence[int] | None = None, **fields: Any
) -> Microbatch:
    """One rollout of all tokens, or several of `lengths`; a mean over tokens by default."""
    total = len(advantages)
    lengths = lengths or [total]
    assert sum(lengths) == total
    mask = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = True
    defaults: dict[str, Any] = {
        "input_ids": mask.to(torch.int64),
        "completion_mask": mask,
        "rollout_logprobs": torch.zeros(total, dtype=torch.float64),
        "advantages": tensor(advantages),
        "temperature": 1.0,
        "token_weights": torch.full((total,), 1 / max(total, 1), dtype=torch.float64),
        "num_completion_tokens": total,
    }
    return Microbatch(**(defaults | fields))
