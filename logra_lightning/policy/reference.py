"""`Reference`: the policy as it was at its start, for a reference KL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.checkpoints.interruption import uninterrupted
from logra_lightning.distributed.sharding import held_rows, is_sharded, local


class Reference:
    """A copy of the weights that train; all others are the policy's own.

    Args:
        policy: with `requires_grad` set on what trains, and the weights of the start.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._start = {
            name: param.detach().to("cpu", copy=True)
            for name, param in policy.named_parameters()
            if param.requires_grad
        }
        self._held: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return sum(value.nbytes for value in self._start.values())

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within it, the policy computes with the weights of the start; never a gradient.

        The copies move to the policy's device when they are first needed, and stay there; of
        sharded weights, the rows that are held.
        """
        params = {n: p for n, p in self._policy.named_parameters() if n in self._start}
        now: dict[str, Tensor] = {}
        with uninterrupted():  # a run that ended here would save them as the policy
            try:
                for name, param in params.items():
                    start = self._start[name]
                    if is_sharded(param) and start.shape == param.shape and name not in self._held:
                        start = start[held_rows(param)].clone()
                    self._held.add(name)
                    self._start[name] = start.to(param.device, param.dtype)
                    now[name] = _put(param, self._start[name])
                with torch.no_grad():
                    yield
            finally:
                for name, value in now.items():
                    _put(params[name], value)


def _put(param: Parameter, value: Tensor) -> Tensor:
    """Let a parameter hold another value; returns the one that it held."""
    if not is_sharded(param):
        before, param.data = param.data, value
        return before
    held = local(param)  # FSDP gathers from this very memory
    before = held.clone()
    held.copy_(value)
    return before
