"""`PromptLoader`: batches of tokenized prompts in an order that survives a resume.

Rows keep all their columns, so that rewards can ask for them by name. The order is a pure function
of the seed and the position; nothing is drawn from the global random state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from logra_lightning.data.order import interleaved, quotas, shuffled
from logra_lightning.types import PromptBatch


class Part(NamedTuple):
    """A source within a data set of several, which stand one after the other.

    Args:
        label: what it is called.
        first: number of its first row.
    """

    label: str
    first: int


@dataclass
class TokenizedPrompts:
    """Prompts as token ids, with the columns of their rows.

    Args:
        prompt_ids: token ids of each prompt.
        rows: all columns of each row.
        numbers: position of each row in the data set before any was dropped, ascending.
        parts: the sources, in the order of their rows.
    """

    prompt_ids: list[list[int]]
    rows: list[dict[str, Any]]
    numbers: list[int]
    parts: list[Part] = field(default_factory=lambda: [Part("data", 0)])

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns that a row has."""
        return column_names(self.rows)

    @property
    def sizes(self) -> list[int]:
        """Prompts of each part."""
        found = [0] * len(self.parts)
        for position in range(len(self)):
            found[self._part_of(position)] += 1
        return found

    def place(self, position: int) -> str:
        """What to call the row at this position, such as `row 3 of 'gsm8k'`."""
        part = self.parts[self._part_of(position)]
        of = f" of {part.label!r}" if len(self.parts) > 1 else ""
        return f"row {self.numbers[position] - part.first}{of}"

    def batch(self, chosen: Sequence[int]) -> PromptBatch:
        """The prompts at these positions; a column that a row does not have is None there."""
        return PromptBatch(
            prompt_ids=[self.prompt_ids[i] for i in chosen],
            columns={name: [self.rows[i].get(name) for i in chosen] for name in self.columns},
            rows=[self.numbers[i] for i in chosen],
        )

    def without(self, positions: Collection[int]) -> TokenizedPrompts:
        """All but the prompts at these positions."""
        kept = [i for i in range(len(self)) if i not in positions]
        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            numbers=[self.numbers[i] for i in kept],
        )

    def with_columns(self, names: Iterable[str]) -> TokenizedPrompts:
        """Rows that also have these columns, None where they had none."""
        blank = dict.fromkeys(names)
        return replace(self, rows=[{**blank, **row} for row in self.rows])

    def _part_of(self, position: int) -> int:
        return bisect_right(self.parts, self.numbers[position], key=lambda part: part.first) - 1


def column_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all columns that one of the rows has."""
    return list(dict.fromkeys(name for row in rows for name in row))


class PromptLoader:
    """Batches of prompts for this rank, in an order that can be resumed.

    It has a length, so Lightning does not fetch ahead and the saved position is the right one.

    Args:
        prompts: what to iterate over.
        batch_size: prompts of one batch over all ranks.
        seed: of the order; None keeps the order of the data and the last, smaller batch.
        weights: of the parts of `prompts`: their shares of the prompts, relative to each other.
            None gives out every prompt once per epoch.
        rank: of this process.
        world_size: number of processes.

    Raises:
        ValueError: a batch that cannot be shared among the ranks, too few prompts for one, or a
            weight so small that its source never has its turn.
    """

    def __init__(
        self,
        prompts: TokenizedPrompts,
        batch_size: int,
        *,
        seed: int | None,
        weights: Sequence[float] | None = None,
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
        self.weights = weights
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0
        self._sizes = prompts.sizes
        self._check_weights()

    def _check_weights(self) -> None:
        if self.seed is None or self.weights is None:
            return
        length = len(self) * self.batch_size
        for part, quota in zip(self.prompts.parts, quotas(self.weights, length), strict=True):
            if quota == 0:
                raise ValueError(
                    f"the weight of source {part.label!r} is so small that none of the {length} "
                    f"prompts of an epoch comes from it: raise its weight in data.init_args"
                )

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
            batch = order[start : start + self.batch_size]
            self.position += 1
            # Neighbours stay on one rank: every other prompt might be of one source alone.
            first, end = (len(batch) * r // self.world_size for r in (self.rank, self.rank + 1))
            yield self.prompts.batch(batch[first:end])

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(len(self.prompts)))
        if self.weights is None:
            return shuffled(len(self.prompts), self.seed, self.epoch)
        length = len(self) * self.batch_size
        return interleaved(self._sizes, self.weights, self.seed, self.epoch, length)

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that were given out when the state was saved."""
        self.epoch, self.position = state["epoch"], state["position"]
