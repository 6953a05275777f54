"""What ranks tell each other; in one process all of it is what it was."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


def num_ranks() -> int:
    """Processes that train together; 1 where there is no process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def rank() -> int:
    """Number of this process among them."""
    return distributed.get_rank() if num_ranks() > 1 else 0


def of_all_ranks(value: T) -> list[T]:
    """What each rank has, in the order of ranks; every rank must call it.

    Args:
        value: anything that can be pickled; tensors are better moved to the CPU first.
    """
    size = num_ranks()
    if size == 1:
        return [value]
    gathered: list[T] = [value] * size
    distributed.all_gather_object(gathered, value)
    return gathered


def sum_over_ranks_(values: Tensor) -> Tensor:
    """Add up `values` over all ranks, in place; every rank must call it with the same shape."""
    if num_ranks() > 1:
        distributed.all_reduce(values)
    return values


def counts_over_ranks(*counts: int) -> list[int]:
    """The sum of each count over all ranks; every rank must call it."""
    return [sum(values) for values in zip(*of_all_ranks(counts), strict=True)]


@torch.no_grad()
def copy_from_rank_0_(tensors: list[Tensor]) -> None:
    """Give all ranks the values that rank 0 has, in place."""
    if num_ranks() > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)
