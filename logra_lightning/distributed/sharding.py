"""Weights of which each rank holds some rows (FSDP2); of any other weight all is held.

A sharded weight is a `DTensor`, cut along its first dimension as `torch.chunk` cuts. What belongs
to it (a residual, moments) is kept as a plain tensor of the rows that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from logra_lightning.distributed.processes import process_index


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold the other rows."""
    return isinstance(tensor, DTensor)


def is_cut_by_rows(tensor: Tensor) -> bool:
    """Whether a sharded weight is cut as this module knows it, along the first dimension alone."""
    return not isinstance(tensor, DTensor) or tuple(tensor.placements) == (Shard(0),)


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the same memory; may be none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_rows(tensor: Tensor) -> slice:
    """Which rows of the whole weight this rank holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0] if tensor.dim() else 0)
    mesh = tensor.device_mesh
    first = min(mesh.get_local_rank() * _rows_per_rank(tensor), tensor.shape[0])
    return slice(first, first + tensor.to_local().shape[0])


@torch.no_grad()
def whole(weight: Tensor, rows: Tensor | None = None) -> Tensor:
    """All rows of a weight, or of what belongs to it; every rank must call it.

    Args:
        weight: sharded or not.
        rows: [held, ...] of this rank; those of `weight` itself when left out.

    Returns:
        The tensor itself where nothing is sharded, else a new one.
    """
    held = local(weight) if rows is None else rows
    if not isinstance(weight, DTensor):
        return held
    mesh, size = weight.device_mesh, _rows_per_rank(weight)
    padded = held.new_zeros(size, *held.shape[1:])
    padded[: held.shape[0]] = held
    gathered = padded.new_empty(size * mesh.size(), *held.shape[1:])
    # As bytes: not every backend knows every dtype.
    distributed.all_gather_single(
        gathered.view(torch.uint8), padded.view(torch.uint8), group=mesh.get_group()
    )
    return gathered[: weight.shape[0]]


def on_first_process(tensor: Tensor) -> Tensor:
    """The tensor on the CPU of rank 0; nothing elsewhere, [0] of its dtype."""
    return tensor.cpu() if process_index() == 0 else tensor.new_empty(0, device="cpu")


def parts_of(module: nn.Module) -> list[FSDPModule]:
    """The sharded modules in it, each of which is gathered as one."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """All weights of a module whole on every rank; within, ranks may run it on their own.

    Every rank must enter it. Nested uses cost nothing. No gradient may come from it.
    """
    parts = _still_sharded(module)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


@contextmanager
def gathered_through_backward(module: nn.Module, inputs: Tensor) -> Iterator[Tensor]:
    """As `gathered` for one module, with gradient: until that of its inputs has been computed.

    Args:
        module: whose weight is used, once or several times.
        inputs: all that is computed with it comes from these.

    Yields:
        The inputs, to use in their place.
    """
    parts = _still_sharded(module)
    if not parts or not (torch.is_grad_enabled() and inputs.requires_grad):
        with gathered(module):
            yield inputs
        return
    for part in parts:
        part.unshard()
    yield _ReshardInBackward.apply(inputs, parts)


class _ReshardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, parts: list[FSDPModule]) -> Tensor:
        ctx.parts = parts
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for part in ctx.parts:
            part.reshard()
        return grad, None


def _still_sharded(module: nn.Module) -> list[FSDPModule]:
    parts = parts_of(module)
    return [part for part in parts if any(map(is_sharded, part.parameters()))]  # type: ignore


def squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Squared Frobenius norm of each tensor, all rows counted; every rank must call it."""
    if not tensors:
        return []
    norms = [torch.linalg.vector_norm(local(t), dtype=torch.float32) for t in tensors]
    squares = torch.stack(norms).to(torch.float64).square()
    sharded = torch.tensor([is_sharded(t) for t in tensors], device=squares.device)
    if sharded.any():
        totals = squares.clone()
        distributed.all_reduce(totals)
        squares = torch.where(sharded, totals, squares)
    return squares.tolist()


def _rows_per_rank(weight: DTensor) -> int:
    return -(-weight.shape[0] // weight.device_mesh.size())
