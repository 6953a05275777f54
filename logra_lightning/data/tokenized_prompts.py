"""`TokenizedPrompts`: prompts as token ids, with the columns of their rows and their sources."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from logra_lightning.types import PromptBatch


class Part(NamedTuple):
    """The rows of one source within `TokenizedPrompts`, where sources stand one after the other.

    Args:
        label: name of the source.
        first: number of its first row; its last row is the one before the next part's first.
    """

    label: str
    first: int


@dataclass
class TokenizedPrompts:
    """N prompts as token ids, with the columns of their rows.

    Rows keep the numbers that they were loaded with. Of two sources with 3 and 2 rows, after row 1
    was dropped: `numbers` is `[0, 2, 3, 4]`, `parts` is `[Part("a", 0), Part("b", 3)]`, `sizes` is
    `[2, 2]`, and position 2 is "row 0 of 'b'".

    Args:
        prompt_ids: N lists of token ids.
        rows: N mappings from column name to value.
        numbers: N numbers of the rows as they were loaded, before any was dropped; ascending.
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
        """Names of all columns that at least one row has."""
        return column_names(self.rows)

    @property
    def sizes(self) -> list[int]:
        """Number of prompts of each part."""
        found = [0] * len(self.parts)
        for position in range(len(self)):
            found[self._part_of(position)] += 1
        return found

    def row_name(self, position: int) -> str:
        """Return what a message calls the row at this position, such as `row 3 of 'gsm8k'`."""
        part = self.parts[self._part_of(position)]
        of_source = f" of {part.label!r}" if len(self.parts) > 1 else ""
        return f"row {self.numbers[position] - part.first}{of_source}"

    def batch(self, chosen: Sequence[int]) -> PromptBatch:
        """Return the prompts at these positions, with None for a column that a row does not have.

        Args:
            chosen: P positions, from 0 to N - 1.
        """
        return PromptBatch(
            prompt_ids=[self.prompt_ids[i] for i in chosen],
            columns={name: [self.rows[i].get(name) for i in chosen] for name in self.columns},
            rows=[self.numbers[i] for i in chosen],
        )

    def without(self, positions: Collection[int]) -> TokenizedPrompts:
        """Return all prompts but those at these positions; the others keep their numbers."""
        kept = [i for i in range(len(self)) if i not in positions]
        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            numbers=[self.numbers[i] for i in kept],
        )

    def with_columns(self, names: Iterable[str]) -> TokenizedPrompts:
        """Return these prompts with further columns, None in each row that lacks them."""
        blank = dict.fromkeys(names)
        return replace(self, rows=[{**blank, **row} for row in self.rows])

    def _part_of(self, position: int) -> int:
        return bisect_right(self.parts, self.numbers[position], key=lambda part: part.first) - 1


def column_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all columns that at least one row has, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
