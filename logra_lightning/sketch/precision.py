"""`full_precision`: matrix products in full fp32, whatever the Trainer or torch is set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it, fp32 matrix products use neither autocast nor TF32 nor bf16.

    Args:
        device: device that computes the products.
    """
    with matmul_precision_kept(), torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        yield


@contextmanager
def matmul_precision_kept() -> Iterator[None]:
    """Put the precision of fp32 matrix products back at the end.

    `torch.get_float32_matmul_precision` alone cannot say it: it raises where a user has set a
    backend's own `fp32_precision`.
    """
    before = [backend.fp32_precision for backend in _backends()]
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_all = None
    try:
        yield
    finally:
        if of_all is not None:
            torch.set_float32_matmul_precision(of_all)
        for backend, precision in zip(_backends(), before, strict=True):
            backend.fp32_precision = precision


def _backends() -> list[Any]:
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
