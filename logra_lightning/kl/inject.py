"""Forward passes as they would be after an update, or along it, without touching a weight.

An update changes a weight W by `dW = -(rate W + D A)`, and so the output of its layer by `X dW^T`,
which is made of `X A^T` and D alone. Hooks add that to the output of each sketched layer:
`injected_update` as it is, `injected_tangents` as a tangent of forward-mode AD. All layers change
at once, so what one layer changes passes through the next ones.

Everything is in the dtype that a layer computes in. A tangent is relative to the update, so that
rounding costs it about a percent, however small the update is; an injected update, as a part of the
output, may vanish in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

from logra_lightning.sketch.bank import SketchedLayer


@dataclass(frozen=True)
class Change:
    """The change of one sketched weight, `dW = -(rate W + D A)`.

    Args:
        layer: the layer whose weight changes.
        direction: makes D [d, r], already multiplied by the step scale. It is called whenever the
            layer runs, so that D of one layer exists at a time.
        rate: the fraction of W that weight decay takes away, already multiplied by the step scale.
    """

    layer: SketchedLayer
    direction: Callable[[], Tensor]
    rate: float

    def of_output(self, inputs: Tensor, output: Tensor) -> Tensor:
        """`X dW^T`, by which the output of the layer changes; computed in the output's dtype.

        Args:
            inputs: X [..., k], the input of the layer.
            output: X W^T + b [..., d], its output.

        Returns:
            [..., d] in the dtype of `output`.
        """
        dtype = output.dtype
        # The root of the rank is not exact in bf16, so it goes into D while that is fp32.
        direction = (self.direction().to(torch.float32) * self.layer.scale).to(dtype)
        projected = inputs.to(dtype) @ self.layer.entries.to(dtype).t()
        change = -(projected @ direction.t())
        if self.rate:
            bias = self.layer.module.bias
            change = change - self.rate * (output if bias is None else output - bias)
        return change


@contextmanager
def injected_update(changes: Iterable[Change]) -> Iterator[None]:
    """Within it, forward passes are those of the model after the update.

    Args:
        changes: the change of each sketched layer.
    """

    def add(change: Change, inputs: Tensor, output: Tensor) -> Tensor:
        return output + change.of_output(inputs, output)

    with _hooked(changes, add):
        yield


@contextmanager
def injected_tangents(changes: Iterable[Change], at: float = 0.0) -> Iterator[None]:
    """Within it, forward passes carry tangents: derivatives along the update, by forward-mode AD.

    With z(s) the output of the model after s times the update, they compute z(at) and dz/ds there.

    Args:
        changes: the change of each sketched layer.
        at: the fraction of the update after which the derivative is taken: 0 takes it at the
            weights as they are, .5 halfway.
    """

    def add(change: Change, inputs: Tensor, output: Tensor) -> Tensor:
        if not at:
            primal, tangent = fwAD.unpack_dual(output)
            own = change.of_output(fwAD.unpack_dual(inputs).primal, primal)
        else:
            whole = change.of_output(inputs, output)  # with its own tangent, by the inputs'
            primal, tangent = fwAD.unpack_dual(output + at * whole)
            own = fwAD.unpack_dual(whole).primal
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
