"""`SketchCapture`: forward hooks by which a backward pass fills the sketches.

Autograd keeps the input X [N, k] of a linear layer only to compute the gradient of its weight. A
frozen weight has none, so X is not kept. The hook keeps `X A^T [N, r]` instead; when the gradient
H [N, d] of the layer's output arrives, it adds `H^T (X A^T)` to the sketch (row 2 of
docs/method.md). `X A^T` is saved through autograd, so non-reentrant activation checkpointing drops
and recomputes it like any other activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from logra_lightning.sketch.bank import SketchBank, SketchedLayer


class _AddToSketch(torch.autograd.Function):
    """Returns the layer's output unchanged; its backward adds to the sketch."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, projected: Tensor, total: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.total = total
        ctx.save_for_backward(projected)
        # Return this tensor and not a view of it: the next layer may change it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (projected,) = ctx.saved_tensors
        _add_product_(ctx.total, grad.reshape(-1, grad.shape[-1]), projected)
        return grad, None, None, None


@torch.no_grad()
def _add_product_(total: Tensor, grad: Tensor, projected: Tensor) -> None:
    """Add `grad^T projected` to `total` [d, r] fp32, for grad [N, d] and projected [N, r]."""
    if grad.dtype == projected.dtype == torch.float32:
        total.addmm_(grad.t(), projected)
    elif grad.is_cuda and grad.dtype == projected.dtype:
        # The tensor cores add up bf16 products in fp32, without a fp32 copy of both operands.
        total.add_(torch.mm(grad.t(), projected, out_dtype=torch.float32))
    else:
        total.addmm_(grad.t().to(torch.float32), projected.to(torch.float32))


class SketchCapture:
    """Hooks on all sketched layers, which stay until `remove` is called.

    Freeze the sketched weights before training. On weights that are not frozen the hooks work the
    same, but autograd computes the dense gradients as well.

    Args:
        sketches: the layers to hook, and the sums that the hooks fill.
    """

    def __init__(self, sketches: SketchBank) -> None:
        self._sketches = sketches
        # Requires a gradient, so that backward also visits the first layers: with frozen embeddings
        # their input requires none.
        self._anchor = torch.zeros(
            (), dtype=torch.float32, device=sketches.flat.device, requires_grad=True
        )
        self._handles: list[RemovableHandle] = [
            layer.module.register_forward_hook(self._hook_for(layer), with_kwargs=True)
            for layer in sketches
        ]

    def _hook_for(self, layer: SketchedLayer) -> Any:
        def hook(
            module: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: dict[str, Tensor],
            output: Tensor,
        ) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            self._sketches.require_step()
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                # Signs are exact in every dtype, gaussian entries only in fp32.
                exact = torch.float32 if layer.entries.is_floating_point() else output.dtype
                inputs = args[0] if args else kwargs["input"]
                inputs = inputs.reshape(-1, inputs.shape[-1]).to(exact)
                projected = inputs @ layer.entries.to(exact).t()  # [N, r]
            return _AddToSketch.apply(output, projected, layer.total, self._anchor)

        return hook

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
