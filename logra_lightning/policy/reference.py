"""`Reference`: the policy as it was when training began, for a reference KL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.checkpoints.interruption import uninterrupted
from logra_lightning.distributed.sharding import held_rows, is_sharded, local


class Reference:
    """A copy of the weights that train, as they are now; all other weights are the policy's own.

    Args:
        policy: the policy before its first step, with `requires_grad` set on the weights that will
            train.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._start = {
            name: local(param).to("cpu", copy=True)
            for name, param in policy.named_parameters()
            if param.requires_grad
        }
        self._held: set[str] = set()

    def __str__(self) -> str:
        size = sum(value.nbytes for value in self._start.values())
        return (
            f"reference KL: {size:,} bytes for the weights that train; the frozen ones are shared "
            f"with the policy."
        )

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within it, the policy computes with its first weights, and without gradients.

        When this is first entered, the copies move to the policy's device, where they stay. Of a
        sharded weight only the rows that this process holds are kept.
        """
        params = {n: p for n, p in self._policy.named_parameters() if n in self._start}
        now: dict[str, Tensor] = {}
        with uninterrupted():  # a run that ended here would save these weights as the policy's
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
    """Give a parameter another value, and return the one that it had."""
    if not is_sharded(param):
        before, param.data = param.data, value
        return before
    held = local(param)  # written in place, because FSDP gathers from this memory
    before = held.clone()
    held.copy_(value)
    return before
