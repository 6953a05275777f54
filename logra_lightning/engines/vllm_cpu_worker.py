"""vLLM's CPU worker with plain weights; only vLLM imports this file, by its qualified name.

vLLM's own CPU worker packs the weights of linear layers and convolutions for its kernels, and drops
the plain ones of linear layers. Nothing could be merged into packed weights, and nobody could share
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.cpu_worker import CPUWorker

_CONVOLUTIONS = ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu")


class PlainCPUWorker(CPUWorker):
    """A worker that computes with the parameters that its model shows, not with packed copies."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, but pack no weight."""
        LinearBase._cpu_skip_gemm_dispatch = True
        try:
            super().load_model(*args, **kwargs)
        finally:
            del LinearBase._cpu_skip_gemm_dispatch
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear"):  # the head ignores the switch
                module.cpu_linear = linear
        compute_with_plain_convolutions()


@cache  # once in a process, whatever number of engines it starts
def compute_with_plain_convolutions() -> None:
    """Let the layers of a hybrid (Gated DeltaNet) read the weights of convolutions as they are.

    On a CPU with bf16 instructions vLLM takes these weights for packed ones without a look at them,
    and plain ones would give wrong logprobs and no error.

    Raises:
        AttributeError: this version of vLLM has these layers, but computes them in another way.
    """
    try:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    except ImportError:  # older than these layers on CPUs
        return
    for name in _CONVOLUTIONS:
        setattr(gdn_attention, name, plain_convolution(getattr(gdn_attention, name)))


def plain_convolution(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The given function of vLLM for a weight of [channels, 1, width] that is not packed."""

    def of_plain_weights(*, weight: Tensor, is_weight_packed: bool, **inputs: Any) -> Tensor:
        del is_weight_packed
        return convolution(weight=weight.flatten(1), is_weight_packed=False, **inputs)

    return of_plain_weights
