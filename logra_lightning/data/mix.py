"""`MixedDataModule`: several data sets at once, each with its share of the prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logra_lightning.data.encode import PromptTemplate
from logra_lightning.data.gym import GymSource
from logra_lightning.data.module import Rows, SourceRows, TokenizedDataModule
from logra_lightning.data.prompts import hold_out
from logra_lightning.data.read import default_label, read_rows


@dataclass
class PromptSource:
    """One data set of a mix.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        name: configuration of the data set on the hub.
        split: of the data set, also a slice such as `test[:200]`.
        columns: new name to existing column or to a field within one.
        prompt_column: holds a string or a list of messages.
        weight: share of the training prompts, relative to the other sources; in validation every
            prompt comes once.
        label: value of the column `source`; left out, the data's own `source` or `data_source`, or
            the last part of `path`.
        system_prompt: left out, the module's.
        prompt_template: left out, the module's.
        val_size: how many of the last rows to hold out for validation.
    """

    path: str
    name: str | None = None
    split: str = "train"
    columns: dict[str, str] | None = None
    prompt_column: str = "prompt"
    weight: float = 1.0
    label: str | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    val_size: int = 0

    def check(self, option: str) -> None:
        """Raise ValueError for a value out of range; `option` is where the source was typed."""
        if not 0 < self.weight < math.inf or self.val_size < 0:
            raise ValueError(
                f"{self.path!r} in {option} needs a positive weight and val_size not negative, got "
                f"{self.weight} and {self.val_size}"
            )
        if self.prompt_template is not None:
            PromptTemplate(self.prompt_template)

    @property
    def known_as(self) -> str:
        """Its label, or the last part of its path."""
        return self.label or default_label(self.path)

    def load(self, option: str) -> tuple[SourceRows, SourceRows]:
        """Training and validation rows; `option` is where the user typed the source."""
        rows = read_rows(
            self.path,
            name=self.name,
            split=self.split,
            columns=self.columns,
            label=self.label,
            option=option,
        )
        train, val = hold_out(rows, self.val_size, self.path)
        return self._source(train, option), self._source(val, option)

    def _source(self, rows: Rows, option: str) -> SourceRows:
        return SourceRows(
            self.known_as,
            rows,
            self.prompt_column,
            self.prompt_template,
            self.system_prompt,
            option,
        )


class MixedDataModule(TokenizedDataModule):
    """Prompts of several data sets, evenly interleaved by their weights.

    Weights are shares of prompts: a small data set with a large weight is seen more often. Each
    walks through permutations of its own, and the order is a pure function of seed and position, so
    that a resumed run continues it exactly. An epoch has as many prompts as all sources have rows.

    Rows have the columns of all sources, None where their own has none, and `source`.

    Args:
        sources: what is trained on.
        tokenizer: as in `TokenizedDataModule`.
        val_sources: what is validated on, beside the rows that `val_size` of a source holds out.
        gym: reasoning-gym tasks as one more source.
        options: as in `TokenizedDataModule`.

    Raises:
        ValueError: no sources, two of the same label, or an option of one out of range.
    """

    def __init__(
        self,
        sources: list[PromptSource],
        tokenizer: str,
        *,
        val_sources: list[PromptSource] | None = None,
        gym: GymSource | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        self.sources = sources
        self.val_sources = val_sources or []
        self.gym = gym
        if not sources and gym is None:
            raise ValueError("data.init_args.sources is empty: name at least one data set")
        for source in sources:
            source.check("data.init_args.sources")
        for source in self.val_sources:
            source.check("data.init_args.val_sources")
        _check_labels([s.known_as for s in sources])
        if any(source.val_size for source in self.val_sources):
            raise ValueError(
                "val_size in data.init_args.val_sources holds rows out of training, but these are "
                "validated on as a whole: use a slice such as split=test[:100]"
            )
        _check_labels(
            [source.known_as for source in sources if source.val_size]
            + [source.known_as for source in self.val_sources]
        )
        if gym is not None:
            gym.check(self.seed, "data.init_args.gym")
        self.weights = [s.weight for s in sources] + ([gym.weight] if gym is not None else [])

    def load_sources(self) -> tuple[list[SourceRows], list[SourceRows]]:
        loaded = [source.load("data.init_args.sources") for source in self.sources]
        if self.gym is not None:
            loaded.append(self.gym.load(self.seed, "data.init_args.gym"))
        train = [train for train, _ in loaded]
        val = [val for _, val in loaded if val.rows]
        val += [source.load("data.init_args.val_sources")[0] for source in self.val_sources]
        return train, val


def _check_labels(labels: Sequence[str]) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(
            f"two sources are called {', '.join(map(repr, twice))}: set their labels in "
            f"data.init_args"
        )
