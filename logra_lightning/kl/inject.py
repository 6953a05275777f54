"""What an update would do to the outputs of the sketched layers, without touching a weight.

A step changes `W` by `dW = -a (rate W + D A)`, and so the output of its layer by `X dW^T`, which
needs `X A^T` and D alone. `injected_tangents` adds it as the tangent of forward-mode AD,
`injected_update` as it is. Both hold for all layers at once, so that what one layer changes passes
through the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

from logra_lightning.distributed.sharding import whole
from logra_lightning.sketch.bank import SketchedLayer
from logra_lightning.sketch.master import join


@dataclass(frozen=True)
class Change:
    """The change of one sketched weight, `-(rate * W + D A)`.

    Args:
        layer: which weight.
        direction: D [d, r] fp32 or bf16, what scales it included.
        rate: of the decay.
    """

    layer: SketchedLayer
    direction: Tensor
    rate: float

    def of_output(self, inputs: Tensor, output: Tensor) -> Tensor:
        """`X dW^T` [..., d] in the dtype of `output`, for the inputs [..., k] of the layer."""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        projected = rows @ self.layer.entries.to(torch.float32).t() * self.layer.scale
        change = -(projected @ self.direction.to(torch.float32).t()).view(output.shape)
        if self.rate:
            bias = self.layer.module.bias
            change = change - self.rate * (output if bias is None else output - bias)
        return change.to(output.dtype)


@contextmanager
def injected_update(changes: Iterable[Change]) -> Iterator[None]:
    """Forward passes as they will be after the update."""

    def add(change: Change, inputs: Tensor, output: Tensor) -> Tensor:
        return output + change.of_output(inputs, output)

    with _hooked(changes, add):
        yield


@contextmanager
def injected_tangents(changes: Iterable[Change]) -> Iterator[None]:
    """Forward passes whose tangents are the derivative along the update."""

    def add(change: Change, inputs: Tensor, output: Tensor) -> Tensor:
        primal, tangent = fwAD.unpack_dual(output)
        own = change.of_output(fwAD.unpack_dual(inputs).primal, primal)
        return fwAD.make_dual(primal, own if tangent is None else tangent + own)

    with fwAD.dual_level(), _hooked(changes, add):
        yield


@contextmanager
def _hooked(
    changes: Iterable[Change], add: Callable[[Change, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    def hook_for(change: Change) -> Any:
        def hook(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> Tensor:
            with torch.autocast(output.device.type, enabled=False):
                return add(change, args[0] if args else kwargs["input"], output)

        return hook

    handles = [
        change.layer.module.register_forward_hook(hook_for(change), with_kwargs=True)
        for change in changes
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def float32_weights(
    model: nn.Module, residual: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Forward passes in fp32, with exact masters, of a model in bf16.

    In bf16 the change of a small update drowns in rounding. Each module's own parameters are in
    fp32 while it runs, so that a second copy of the model never exists.

    Args:
        model: whose forward passes.
        residual: of a weight, from `RowAdam.residual`.
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
    """Hooks that give a module fp32 parameters of its own while it runs."""

    def __init__(self, module: nn.Module, residual: Callable[[Tensor], Tensor | None]) -> None:
        # Looked up now: sharded weights are other tensors while their module runs.
        self._low = {
            name: (parameter, low)
            for name, parameter in module.named_parameters(recurse=False)
            if (low := residual(parameter)) is not None
        }
        self._saved: list[tuple[nn.Parameter, Tensor]] = []
        # Inside the hooks of FSDP: after its gathering, before its freeing.
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
        """Also where an error, or Ctrl-C, ended a forward pass."""
        for handle in self._handles:
            handle.remove()
        self._restore()
