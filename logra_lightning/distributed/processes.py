"""What the processes that train together tell each other; a run of one process needs no group."""

from __future__ import annotations

import atexit
from collections.abc import Callable
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


def all_or_none(make: Callable[[], T]) -> T:
    """What `make` returns in this process; every process must call it.

    Where it fails in one process, it fails in all of them, so that none waits for another.

    Args:
        make: called once, without arguments.

    Raises:
        ValueError: `make` raised one in the first process that failed; with the same message.
        RuntimeError: it raised anything else there; with the same message. The process in which it
            failed raises the error itself.
    """
    problem: Exception | None = None
    try:
        result = make()
    except Exception as error:
        problem = error
    own = None if problem is None else (isinstance(problem, ValueError), str(problem))
    told = next((found for found in of_all_processes(own) if found is not None), None)
    if told is None:
        return result
    if problem is not None and told == own:
        raise problem
    is_value_error, message = told
    raise (ValueError if is_value_error else RuntimeError)(message) from problem


def from_first_process(value: T | None) -> T:
    """The value that process 0 passes, in all processes; every process must call it.

    Args:
        value: anything that can be pickled; what other processes pass is not looked at.
    """
    found = [value]
    if num_processes() > 1:
        distributed.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


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


def backend_for(device: torch.device) -> str | None:
    """What sends the messages of processes that train on such a device.

    On CUDA tensors travel by nccl and Python values by gloo, which needs no GPU memory and does not
    wait for kernels. This was not run, for want of a GPU. On all else it is Lightning's choice, so
    None.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else None


def leave_group_at_exit() -> None:
    """Let the process leave its group when it ends; otherwise nccl warns that it did not."""

    def leave() -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    atexit.register(leave)


@torch.no_grad()
def copy_from_first_process_(tensors: list[Tensor]) -> None:
    """Give all processes the values that process 0 has, in place."""
    if num_processes() > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)
