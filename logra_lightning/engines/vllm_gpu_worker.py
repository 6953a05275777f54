"""vLLM's GPU worker on the trainer's GPU; only vLLM imports this file, by its qualified name.

vLLM's own worker takes the first visible GPU for an engine of one process. In a run on several GPUs
every process would sample on the first one, and its collectives would use the wrong device.
"""

from __future__ import annotations

import os

from vllm.v1.worker.gpu_worker import Worker

from logra_lightning.engines.vllm_launch import FIRST_GPU


class TrainersGPUWorker(Worker):
    """A worker that counts GPUs from the trainer's, whose index is in the environment."""

    def init_device(self) -> None:
        """Initialize the device as vLLM does, on the trainer's GPU."""
        self.local_rank += int(os.environ.get(FIRST_GPU, "0"))
        super().init_device()
