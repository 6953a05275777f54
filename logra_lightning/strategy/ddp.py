"""`SketchDDPStrategy`: gradient sketches on several devices, each with the whole model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from logra_lightning.distributed.processes import copy_from_first_process_
from logra_lightning.strategy.mixin import SketchMixin


class SketchDDPStrategy(SketchMixin, DDPStrategy):
    """Gradient sketches on several devices, each with the whole model: `strategy: sketch_ddp`.

    The module is not wrapped in `DistributedDataParallel`. Sketches and the few dense gradients are
    added up once per step, so ranks may have different numbers of microbatches, and a module must
    divide its loss by what the whole step has, over all ranks.

    Args:
        process_group_backend: `nccl` on CUDA and `gloo` on CPUs when left out.
        timeout_s: seconds after which a rank gives up on the others.
        options: those of `SketchMixin`, and what the Trainer gives.
    """

    strategy_name = "sketch_ddp"

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )

    def configure_ddp(self) -> None:
        """Start from the weights and buffers of rank 0, as wrapping the module would."""
        module = self._module
        copy_from_first_process_([p.data for p in module.parameters()] + list(module.buffers()))
