"""`Reference`: the policy as it was at its start, for a reference KL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return sum(value.nbytes for value in self._start.values())

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within it, the policy computes with the weights of the start; never a gradient.

        The copies move to the policy's device when they are first needed, and stay there.
        """
        params = {n: p for n, p in self._policy.named_parameters() if n in self._start}
        now = {name: param.data for name, param in params.items()}
        try:
            for name, param in params.items():
                self._start[name] = self._start[name].to(param.device, param.dtype)
                param.data = self._start[name]
            with torch.no_grad():
                yield
        finally:
            for name, param in params.items():
                param.data = now[name]
