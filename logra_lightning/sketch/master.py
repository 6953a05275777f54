"""`split` and `join`: an fp32 master weight as a bf16 weight and an int16 residual, bit for bit.

The model computes with the bf16 weight. The residual holds the low 16 bits that bf16 has no room
for, so updates smaller than a step of bf16 add up instead of being rounded away. Together they
take four bytes, no more than the fp32 master alone. For example the master 1.001953125
(0x3F804000) is the weight 1.0 (0x3F80) and the residual 0x4000.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A bf16 weight and an int16 residual that together hold every bit of `master`.

    The weight is rounded to nearest, ties away from zero. Torch rounds ties to even, which on some
    ties leaves a residual of 32,768, one more than int16 holds.

    Args:
        master: [...] fp32.

    Returns:
        The weight [...] bf16 and the residual [...] int16.
    """
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    residual = torch.empty_like(master, dtype=torch.int16)
    split_(master.clone(), weight, residual)
    return weight, residual


def split_(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """As `split`, but writes into `weight` and `residual`, and overwrites `master`."""
    bits = master.view(torch.int32)
    residual.copy_(bits)  # keeps the low 16 bits
    bits.add_(0x8000).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 master [...] of a bf16 weight and its int16 residual: the inverse of `split`."""
    bits = weight.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(residual.to(torch.int32)).view(torch.float32)
