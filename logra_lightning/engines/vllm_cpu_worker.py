"""vLLM's CPU worker with plain weights; only vLLM imports this file, by its qualified name.

vLLM's own CPU worker packs the weights of linear layers for its matrix products and drops the plain
ones. Nothing could be merged into packed weights, and nobody could share them.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.cpu_worker import CPUWorker


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
