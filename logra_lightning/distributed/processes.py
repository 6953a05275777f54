"""What the processes that train together tell each other; a run of one process needs no group."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


def num_processes() -> int:
    """How many processes train together; 1 where there is no process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def process_index() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if num_processes() > 1 else 0


def of_all_processes(value: T) -> list[T]:
    """The values that all processes pass, in the order of processes; every process must call it.

    With two processes that pass `"a"` and `"b"`, both get `["a", "b"]`. In a run of one process the
    value is returned as it is, in a list.

    Args:
        value: anything that can be pickled; tensors are better moved to the CPU first.
    """
    size = num_processes()
    if size == 1:
        return [value]
    gathered: list[T] = [value] * size
    distributed.all_gather_object(gathered, value)
    return gathered


def sum_over_processes_(values: Tensor) -> Tensor:
    """Add up `values` over all processes, in place.

    Every process must call it, with a tensor of the same shape.
    """
    if num_processes() > 1:
        distributed.all_reduce(values)
    return values


def counts_over_processes(*counts: int) -> list[int]:
    """The sum of each count over all processes; every process must call it.

    With two processes that pass `(1, 10)` and `(2, 10)`, both get `[3, 20]`.
    """
    return [sum(values) for values in zip(*of_all_processes(counts), strict=True)]


@torch.no_grad()
def copy_from_first_process_(tensors: list[Tensor]) -> None:
    """Give all processes the values that process 0 has, in place."""
    if num_processes() > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)
