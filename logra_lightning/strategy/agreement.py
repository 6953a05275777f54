"""Checks now and then that all processes have made the same update of the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from logra_lightning.distributed.processes import num_processes, of_all_processes
from logra_lightning.distributed.sharding import is_sharded, local
from logra_lightning.sketch.factors import Factors

EVERY_STEPS = 100
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_update(model: nn.Module, factors: Factors | None, step: int) -> None:
    """Compare what all processes have merged, and the weights that each of them has whole.

    Every process must call it. What is compared are sums of bits, one per tensor: the tensors are
    read once, and nothing else is made of them.

    Args:
        model: its weights are compared, but for sharded ones.
        factors: what the step merged.
        step: number of the step, from 0, for the message.

    Raises:
        RuntimeError: processes differ.
    """
    if num_processes() == 1:
        return
    found = of_all_processes(_sums(model, factors))
    for process, other in enumerate(found):
        names = [n for n in {**found[0], **other} if found[0].get(n) != other.get(n)]
        if names:
            raise RuntimeError(
                f"step {step}: processes 0 and {process} no longer hold the same: {names[0]} "
                f"differs, one of {len(names)}; resume from a checkpoint, and where this comes "
                f"again, look for a faulty device or for code that is not the same in all processes"
            )


@torch.no_grad()
def _sums(model: nn.Module, factors: Factors | None) -> dict[str, int]:
    named = list(_tensors(model, factors))
    if not named:
        return {}
    sums = torch.stack([_sum_of_bits(tensor) for _, tensor in named]).tolist()
    return {name: total for (name, _), total in zip(named, sums, strict=True)}


def _tensors(model: nn.Module, factors: Factors | None) -> Iterator[tuple[str, Tensor]]:
    for name, direction in (factors.directions if factors else {}).items():
        yield f"the direction of {name!r}", direction
    for name, param in model.named_parameters():
        if not is_sharded(param):
            yield f"the weight {name!r}", local(param)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)
