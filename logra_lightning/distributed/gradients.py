"""Sums, over all processes, the dense gradients that nothing else sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from logra_lightning.distributed.processes import sum_over_processes_


def sum_dense_gradients_(params: Sequence[Parameter], device: torch.device) -> None:
    """Replace each parameter's gradient by its sum over all processes.

    All gradients travel in one fp32 tensor, so there is one message however many parameters there
    are. A process whose rollouts are all masked has no gradients: it adds zeros, and gets the sum
    of the others. A parameter without a gradient in any process keeps none.

    Args:
        params: the same parameters in the same order in every process.
        device: device of the tensor that is sent.
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
    counts, *sums = flat.split([len(params), *(p.numel() for p in params)])
    for param, total, count in zip(params, sums, counts.tolist(), strict=True):
        param.grad = total.view_as(param).to(param.dtype) if count else None
