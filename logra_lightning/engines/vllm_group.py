"""Processes that share one vLLM engine by tensor parallelism; each runs one of its workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from logra_lightning.distributed.processes import num_processes, of_all_processes, process_index


class EngineGroup:
    """Consecutive processes with one engine between them, which sample together.

    Of 4 processes with `tensor_parallel_size` 2, the first two share one engine and the last two
    another.

    Args:
        tensor_parallel_size: number of processes that share an engine.

    Raises:
        ValueError: the number of processes is not a multiple of it.
    """

    def __init__(self, tensor_parallel_size: int) -> None:
        if num_processes() % tensor_parallel_size:
            raise ValueError(
                f"{num_processes()} processes cannot share engines of {tensor_parallel_size} "
                f"processes each: set model.engine.init_args.tensor_parallel_size to a divisor"
            )
        self.size = tensor_parallel_size

    def options(self, device: torch.device) -> dict[str, Any]:
        """Options of `vllm.LLM` for such a group; sets the environment variables it reads too.

        Several groups are independent of each other, so one may have no prompts. As vLLM's data
        parallelism they would wait for each other at every token.

        Args:
            device: where this process's part of the policy is.
        """
        os.environ["RANK"] = str(process_index())
        os.environ["WORLD_SIZE"] = str(num_processes())
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        return {"distributed_executor_backend": "external_launcher"}

    def gather(
        self, prompt_ids: Sequence[list[int]], seed: int
    ) -> tuple[list[list[int]], int, slice]:
        """The prompts of all processes of the group, one seed, and which prompts are this one's.

        If the first process passes `[[1, 2]]` with seed 7 and the second `[[3], [4]]` with seed 8,
        both get the prompts `[[1, 2], [3], [4]]` and seed 7; the first gets `slice(0, 1)`, the
        second `slice(1, 3)`. Every process must call it.

        Args:
            prompt_ids: prompts of this process, each a list of token ids.
            seed: seed of this process.
        """
        first = process_index() // self.size * self.size
        group = of_all_processes((list(prompt_ids), seed))[first : first + self.size]
        before = sum(len(prompts) for prompts, _ in group[: process_index() - first])
        together = [ids for prompts, _ in group for ids in prompts]
        return together, group[0][1], slice(before, before + len(prompt_ids))
