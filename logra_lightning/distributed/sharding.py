"""Weights that processes share (FSDP2), each process holding some of the rows.

A sharded weight is a `DTensor`, cut along its first dimension as `torch.chunk` cuts: of 10 rows,
four processes hold 3, 3, 3 and 1. What belongs to the weight (a residual, moments) is kept as a
plain tensor with the same rows. Of a weight that is not sharded, every process holds all rows.
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
    """Whether this process holds only some of the rows, and other processes the others."""
    return isinstance(tensor, DTensor)


def is_cut_by_rows(tensor: Tensor) -> bool:
    """Whether a weight is not sharded, or sharded as these functions need it: by rows alone."""
    return not isinstance(tensor, DTensor) or tuple(tensor.placements) == (Shard(0),)


def local(tensor: Tensor) -> Tensor:
    """The rows that this process holds, in the same memory; there may be none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_rows(tensor: Tensor) -> slice:
    """The place of the rows that this process holds: of 10 rows, process 1 of 4 has slice(3, 6)."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0] if tensor.dim() else 0)
    mesh = tensor.device_mesh
    first = min(mesh.get_local_rank() * _rows_per_process(tensor), tensor.shape[0])
    return slice(first, first + tensor.to_local().shape[0])


@torch.no_grad()
def whole(weight: Tensor, rows: Tensor | None = None) -> Tensor:
    """All rows of a weight, or of something that belongs to it; every process must call it.

    Args:
        weight: [rows, ...], a weight, sharded or not.
        rows: [held rows, ...], what this process holds of a tensor that belongs to the weight, for
            instance its residual; when left out, what it holds of the weight itself.

    Returns:
        [rows, ...]; a new tensor where the weight is sharded, else the tensor itself.
    """
    held = local(weight) if rows is None else rows
    if not isinstance(weight, DTensor):
        return held
    mesh, size = weight.device_mesh, _rows_per_process(weight)
    padded = held.new_zeros(size, *held.shape[1:])
    padded[: held.shape[0]] = held
    gathered = padded.new_empty(size * mesh.size(), *held.shape[1:])
    # Sent as bytes, because not every backend can send every dtype.
    distributed.all_gather_single(
        gathered.view(torch.uint8), padded.view(torch.uint8), group=mesh.get_group()
    )
    return gathered[: weight.shape[0]]


@torch.no_grad()
def rows_from_first_process(weight: DTensor, full: Tensor | None, device: torch.device) -> Tensor:
    """The rows of a weight that this process holds, sent by process 0, which has all of them.

    Every process must call it. Process 0 needs memory for the whole weight on `device`, all others
    for their own rows.

    Args:
        weight: [rows, ...], the sharded weight; only its shape and dtype are looked at.
        full: [rows, ...], all rows, in process 0; None in all others.
        device: where to hold the rows.

    Returns:
        [held rows, ...], a new tensor.
    """
    mesh, size = weight.device_mesh, _rows_per_process(weight)
    held = torch.empty(size, *weight.shape[1:], dtype=weight.dtype, device=device)
    parts = None
    if full is not None:
        padded = full.detach().to(device=device, dtype=weight.dtype).contiguous()
        missing = size * mesh.size() - weight.shape[0]
        if missing:
            padded = torch.cat([padded, padded.new_zeros(missing, *weight.shape[1:])])
        parts = [part.view(torch.uint8) for part in padded.split(size)]
    # Sent as bytes, because not every backend can send every dtype.
    distributed.scatter(held.view(torch.uint8), parts, group=mesh.get_group(), group_src=0)
    rows = held_rows(weight)
    return held[: rows.stop - rows.start]


def on_first_process(tensor: Tensor) -> Tensor:
    """In process 0 the tensor on the CPU, in all others an empty one, [0], of its dtype."""
    return tensor.cpu() if process_index() == 0 else tensor.new_empty(0, device="cpu")


def parts_of(module: nn.Module) -> list[FSDPModule]:
    """The sharded modules in a module; the weights of each are gathered together."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within it, every process has all weights of a module whole, and may run it alone.

    All processes must enter it. Entering it again inside costs nothing. Nothing that is computed
    within may be differentiated; for that there is `gathered_through_backward`.
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
    """Like `gathered`, but what is computed within may be differentiated.

    The weights stay whole until the backward pass has computed the gradient of `inputs`.

    Args:
        module: the module with the weights; it may be used several times within.
        inputs: the tensor from which everything is computed that uses the weights.

    Yields:
        A tensor equal to `inputs`, to compute with instead.
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
    """Squared Frobenius norm of each tensor, over all its rows; every process must call it."""
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


def _rows_per_process(weight: DTensor) -> int:
    return -(-weight.shape[0] // weight.device_mesh.size())
