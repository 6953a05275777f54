"""`SketchDDPStrategy`: gradient sketches on several devices, each with the whole model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from logra_lightning.distributed.processes import backend_for, copy_from_first_process_
from logra_lightning.strategy.mixin import SketchMixin


class SketchDDPStrategy(SketchMixin, DDPStrategy):
    """Gradient sketches on several devices, each with the whole model: `strategy: sketch_ddp`.

    One process trains on each device. Sketches and the few dense gradients are summed over the
    processes once per step; the module is not wrapped in `DistributedDataParallel`. So processes
    may have different numbers of microbatches. Because gradients are summed and not averaged, the
    module has to divide its loss by the number of tokens that all processes train in the step.

    Args:
        process_group_backend: how processes talk to each other; when left out, `gloo` on CPUs, and
            on CUDA `cpu:gloo,cuda:nccl`, which was not run: tensors by nccl, all else by gloo.
        timeout_s: seconds that a process waits for the others before it fails.
        options: `rank`, `targets` and the other options of `SketchMixin`, and what the Trainer
            passes to every strategy.
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

    def _get_process_group_backend(self) -> str:
        backend = self._process_group_backend or backend_for(self.root_device)
        return backend or super()._get_process_group_backend()

    def configure_ddp(self) -> None:
        """Give every process the weights and buffers of process 0.

        `DistributedDataParallel` would do this when it wraps the module.
        """
        module = self._module
        copy_from_first_process_([p.data for p in module.parameters()] + list(module.buffers()))
