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
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    residual = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), residual


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 residual; the inverse of `split`."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + residual.to(torch.int32)).view(torch.float32)
