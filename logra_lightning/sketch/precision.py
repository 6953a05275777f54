"""`full_precision`: matrix products in full fp32, whatever the Trainer or torch is set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it, fp32 matrix products use neither autocast nor TF32 nor bf16.

    Args:
        device: device that computes the products.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
