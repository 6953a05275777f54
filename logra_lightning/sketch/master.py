"""Exact fp32 masters in four bytes: a bf16 weight and an int16 residual (decision 5.5).

The weight that the model computes with is the high half; the residual holds what bf16 cannot, so
small updates add up instead of drowning in rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A bf16 weight and an int16 residual that together hold every bit of `master`.

    Rounds half away from zero. Rounding half to even would overflow the residual on some ties.

    Args:
        master: fp32, any shape.
    """
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    residual = torch.empty_like(master, dtype=torch.int16)
    split_(master.clone(), weight, residual)
    return weight, residual


def split_(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """As `split`, into the given tensors; `master` is used up."""
    bits = master.view(torch.int32)
    residual.copy_(bits)  # keeps the low 16 bits
    bits.add_(0x8000).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 residual; the inverse of `split`."""
    bits = weight.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(residual.to(torch.int32)).view(torch.float32)
