"""`PromptLoader`: batches of tokenized prompts in an order that survives a resume.

Rows keep all their columns, so that rewards can ask for them by name. The order is a pure function
of the seed and the position; nothing is drawn from the global random state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from logra_lightning.seeding import derive_seed
from logra_lightning.types import PromptBatch


@dataclass
class TokenizedPrompts:
    """Prompts as token ids, with the columns of their rows.

    Args:
        prompt_ids: token ids of each prompt.
        rows: all columns of each row.
        numbers: position of each row in the data set before any was dropped.
    """

    prompt_ids: list[list[int]]
    rows: list[dict[str, Any]]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def batch(self, chosen: Sequence[int]) -> PromptBatch:
        """The prompts at these positions."""
        names = list(self.rows[0]) if self.rows else []
        return PromptBatch(
            prompt_ids=[self.prompt_ids[i] for i in chosen],
            columns={name: [self.rows[i].get(name) for i in chosen] for name in names},
            rows=[self.numbers[i] for i in chosen],
        )


class PromptLoader:
    """Batches of prompts for this rank, in an order that can be resumed.

    It has a length, so Lightning does not fetch ahead and the saved position is the right one.

    Args:
        prompts: what to iterate over.
        batch_size: prompts of one batch over all ranks.
        seed: of the order; None keeps the order of the data and the last, smaller batch.
        rank: of this process.
        world_size: number of processes.

    Raises:
        ValueError: a batch that cannot be shared among the ranks, or too few prompts for one.
    """

    def __init__(
        self,
        prompts: TokenizedPrompts,
        batch_size: int,
        *,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            nearest = max(1, round(batch_size / world_size)) * world_size
            raise ValueError(
                f"prompts_per_step must be a positive multiple of the {world_size} processes, got "
                f"{batch_size}: the nearest is {nearest}"
            )
        if seed is not None and len(prompts) < batch_size:
            raise ValueError(
                f"prompts_per_step is {batch_size}, but there are only {len(prompts)} prompts"
            )
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        full, rest = divmod(len(self.prompts), self.batch_size)
        return full + (self.seed is None and rest > 0)

    def __iter__(self) -> Iterator[PromptBatch]:
        if self.seed is None:
            self.position = 0
        elif self.position >= len(self):
            self.epoch += 1
            self.position = 0
        order = self._order()
        while self.position < len(self):
            start = self.position * self.batch_size
            chosen = order[start : start + self.batch_size][self.rank :: self.world_size]
            self.position += 1
            yield self.prompts.batch(chosen)

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(len(self.prompts)))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch, "order"))
        return torch.randperm(len(self.prompts), generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that were given out when the state was saved."""
        self.epoch, self.position = state["epoch"], state["position"]
