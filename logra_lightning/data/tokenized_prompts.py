"""`TokenizedPrompts`: prompts as token ids, with the columns of their rows and their sources."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

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
