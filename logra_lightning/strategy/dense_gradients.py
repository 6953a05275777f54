"""Dense gradients over all ranks, where nothing else adds them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from logra_lightning.distributed.processes import sum_over_processes_


def sum_dense_gradients_(params: Sequence[Parameter], device: torch.device) -> None:
    """Add up the gradients of each parameter over all ranks, in fp32 and in one reduction.

    A rank whose rollouts are all masked has no gradient where the others have one.
    """
    if not params:
        return
    parts = [
        torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float()
        for p in params
    ]
    has_gradient = torch.tensor(
        [p.grad is not None for p in params], dtype=torch.float32, device=device
    )
    flat = torch.cat([has_gradient, *(part.reshape(-1) for part in parts)])
    sum_over_processes_(flat)
    anywhere, *sums = flat.split([len(params), *(p.numel() for p in params)])
    for param, total, count in zip(params, sums, anywhere.tolist(), strict=True):
        param.grad = total.view_as(param).to(param.dtype) if count else None
