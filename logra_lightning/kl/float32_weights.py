"""Exact fp32 forward passes, also of a bf16 model, whose weights are widened module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.distributed.sharding import whole
from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.sketch.master import join
from logra_lightning.sketch.precision import full_precision


@contextmanager
def exact_forwards(probe: KLProbe, residual: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Within it, a probe runs in fp32 with the exact masters, whatever the precision of training.

    Args:
        probe: the probe.
        residual: gives the int16 residual of a weight, as in `float32_weights`.
    """
    with (
        probe.prepared(),
        full_precision(probe.device),
        float32_weights(probe.model, residual),
    ):
        yield


@contextmanager
def float32_weights(
    model: nn.Module, residual: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Within it, forward passes of a bf16 model are in fp32, with the exact masters.

    In bf16 the change of a small update would be rounded away. A module has its own parameters in
    fp32 only while it runs, so there is never a second copy of the whole model.

    Args:
        model: the model; nothing happens to modules whose parameters are fp32 already.
        residual: gives the int16 residual of a weight, None where it has none; see
            `RowAdam.residual`.
    """
    widened = [
        _Widened(module, residual)
        for module in model.modules()
        if any(p.dtype != torch.float32 for p in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for one in widened:
            one.remove()


class _Widened:
    """Hooks on a module by which its own parameters are fp32 while it runs."""

    def __init__(self, module: nn.Module, residual: Callable[[Tensor], Tensor | None]) -> None:
        # Looked up before the module runs, since FSDP puts other tensors in place then.
        self._low = {
            name: (parameter, low)
            for name, parameter in module.named_parameters(recurse=False)
            if (low := residual(parameter)) is not None
        }
        self._saved: list[tuple[nn.Parameter, Tensor]] = []
        # FSDP gathers the weights before the first of these hooks and frees them after the second.
        self._handles = [
            module.register_forward_pre_hook(self._widen),
            module.register_forward_hook(self._restore, prepend=True),
        ]

    def _widen(self, module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            data = parameter.data
            self._saved.append((parameter, data))
            if name in self._low:
                parameter.data = join(data, whole(*self._low[name]))
            else:
                parameter.data = data.to(torch.float32)

    def _restore(self, *_: Any) -> None:
        while self._saved:
            parameter, data = self._saved.pop()
            parameter.data = data

    def remove(self) -> None:
        """Take the hooks off, and restore what an error or Ctrl-C left in fp32."""
        for handle in self._handles:
            handle.remove()
        self._restore()
