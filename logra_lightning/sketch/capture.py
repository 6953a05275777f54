"""Forward hooks that turn a backward pass into sketches, without the dense gradient.

A frozen linear layer keeps no input for its weight's sake; the hook keeps `X A^T [N, r]` instead
and, when the output gradient `H [N, d]` arrives, adds `H^T (X A^T)` to the sketch (row 2). Saving
goes through autograd, so non-reentrant activation checkpointing recomputes it like the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from logra_lightning.sketch.bank import SketchBank, SketchedLayer


class _AddToSketch(torch.autograd.Function):
    """Identity on the layer's output; its backward adds to the sketch."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, projected: Tensor, total: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.total = total
        ctx.save_for_backward(projected)
        # The very tensor, and not a view of it: what follows may change it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (projected,) = ctx.saved_tensors
        _add_product_(ctx.total, grad.reshape(-1, grad.shape[-1]), projected)
        return grad, None, None, None


@torch.no_grad()
def _add_product_(total: Tensor, grad: Tensor, projected: Tensor) -> None:
    """`total [d, r] += grad [N, d]^T projected [N, r]`, summed in fp32."""
    if grad.dtype == projected.dtype == torch.float32:
        total.addmm_(grad.t(), projected)
    elif grad.is_cuda and grad.dtype == projected.dtype:
        # fp32 out of the tensor cores, instead of a copy of both operands in fp32.
        total.add_(torch.mm(grad.t(), projected, out_dtype=torch.float32))
    else:
        total.addmm_(grad.t().to(torch.float32), projected.to(torch.float32))


class SketchCapture:
    """Hooks on every sketched layer of a bank, until `remove`.

    Freeze the weights before training; the hooks work the same on weights that are not frozen,
    but then the dense gradient exists as well.

    Args:
        bank: whose modules are hooked and whose sums are filled.
    """

    def __init__(self, bank: SketchBank) -> None:
        self._bank = bank
        # A graph edge for layers whose input does not require a gradient: with frozen embeddings
        # backward would never visit the first ones.
        self._anchor = torch.zeros(
            (), dtype=torch.float32, device=bank.flat.device, requires_grad=True
        )
        self._handles: list[RemovableHandle] = [
            sketch.module.register_forward_hook(self._hook_for(sketch), with_kwargs=True)
            for sketch in bank
        ]

    def _hook_for(self, sketch: SketchedLayer) -> Any:
        def hook(
            module: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: dict[str, Tensor],
            output: Tensor,
        ) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            self._bank.require_step()
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                # Signs are exact in any dtype, gaussian entries in fp32 alone.
                exact = torch.float32 if sketch.entries.is_floating_point() else output.dtype
                inputs = args[0] if args else kwargs["input"]
                inputs = inputs.reshape(-1, inputs.shape[-1]).to(exact)
                projected = inputs @ sketch.entries.to(exact).t()  # [N, r]
            return _AddToSketch.apply(output, projected, sketch.total, self._anchor)

        return hook

    def remove(self) -> None:
        """Take the hooks off; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
