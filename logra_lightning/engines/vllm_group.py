"""Ranks that share one vLLM engine by tensor parallelism, each with a worker of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from logra_lightning.distributed.processes import num_processes, of_all_processes, process_index


class EngineGroup:
    """Consecutive ranks with one engine between them; all of them sample together.

    Args:
        tensor_parallel_size: ranks to an engine.

    Raises:
        ValueError: the ranks cannot be shared out like this.
    """

    def __init__(self, tensor_parallel_size: int) -> None:
        if num_processes() % tensor_parallel_size:
            raise ValueError(
                f"{num_processes()} ranks cannot share engines of {tensor_parallel_size} each: set "
                f"model.engine.init_args.tensor_parallel_size to a divisor"
            )
        self.size = tensor_parallel_size

    def options(self) -> dict[str, Any]:
        """What `vllm.LLM` needs to know, and the environment it looks at."""
        os.environ["RANK"] = str(process_index())
        os.environ["WORLD_SIZE"] = str(num_processes())
        os.environ.setdefault("LOCAL_RANK", "0")
        options: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
        if num_processes() > self.size:
            options["data_parallel_size"] = num_processes() // self.size
        return options

    def gather(
        self, prompt_ids: Sequence[list[int]], seed: int
    ) -> tuple[list[list[int]], int, slice]:
        """Prompts of all ranks of the group, the first one's seed, and which are this rank's.

        Every rank must call it.
        """
        first = process_index() // self.size * self.size
        group = of_all_processes((list(prompt_ids), seed))[first : first + self.size]
        before = sum(len(prompts) for prompts, _ in group[: process_index() - first])
        together = [ids for prompts, _ in group for ids in prompts]
        return together, group[0][1], slice(before, before + len(prompt_ids))
