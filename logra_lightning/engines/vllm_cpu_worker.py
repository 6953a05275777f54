"""vLLM's CPU worker with plain weights. vLLM alone imports this file, by its qualified name.

By default the CPU worker packs the weights of linear layers for its matrix products and drops the
plain ones, so that nothing could be merged into them or shared.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainCPUWorker(CPUWorker):
    """Computes with the parameters that the model shows."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM does, without packing."""
        LinearBase._cpu_skip_gemm_dispatch = True
        try:
            super().load_model(*args, **kwargs)
        finally:
            del LinearBase._cpu_skip_gemm_dispatch
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear"):  # the head is packed whatever the switch says
                module.cpu_linear = linear
