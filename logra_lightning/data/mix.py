"""`MixedDataModule`: several sources at once, each with its share of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from logra_lightning.data.gym import GymSource
from logra_lightning.data.module import TokenizedDataModule
from logra_lightning.data.prompts import PromptSource
from logra_lightning.data.source_rows import SourceRows
from logra_lightning.data.where import told_at


class MixedDataModule(TokenizedDataModule):
    """Prompts of several data sets, evenly interleaved by their weights.

    With the weights 2 and 1, two of three training prompts are of the first source, however large
    the data sets are: a small one with a large weight is seen more often. An epoch has as many
    prompts as all sources have rows. Each source is walked through in permutations of its own; the
    order depends on the seed and the position alone, so that a resumed run continues it exactly.

    Rows have the columns of all sources, None where their own source lacks one, and `source`.

    Args:
        sources: data sets to train on.
        tokenizer: folder or hub name of the tokenizer; the command line sets it to `model.model`.
        val_sources: data sets to validate on, besides the rows that sources hold out with their
            `val_size`.
        gym: tasks of reasoning-gym, as one more source to train on.
        options: further options of `TokenizedDataModule`.

    Raises:
        ValueError: there are no sources, two have the same label, or an option is out of range.
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
        val_sources = val_sources or []
        if not sources and gym is None:
            raise ValueError("data.init_args.sources is empty: name at least one data set")
        # The option as the user types it, to the source that it holds.
        self._sources: dict[str, PromptSource | GymSource] = {
            f"data.init_args.sources[{i}]": source for i, source in enumerate(sources)
        }
        if gym is not None:
            self._sources["data.init_args.gym"] = gym
        self._val_sources = {
            f"data.init_args.val_sources[{i}]": source for i, source in enumerate(val_sources)
        }
        for place, source in (self._sources | self._val_sources).items():
            with told_at(place):
                source.check(self.seed)
        for place, source in self._val_sources.items():
            if source.val_size:
                raise ValueError(
                    f"{place}: val_size holds rows out of training, but this source is validated "
                    f"on as a whole: use a slice such as split=test[:100]"
                )
        held_out = [source for source in sources if source.val_size]
        _check_labels([source.known_as for source in sources])
        _check_labels([source.known_as for source in held_out + val_sources])
        self.weights = [source.weight for source in self._sources.values()]

    def load_rows(self) -> tuple[list[SourceRows], list[SourceRows]]:
        train, val = [], []
        for place, source in self._sources.items():
            with told_at(place):
                found, held_out = source.load(self.seed)
            train.append(replace(found, typed_at=place))
            if held_out.rows:
                val.append(replace(held_out, typed_at=place))
        for place, val_source in self._val_sources.items():
            with told_at(place):
                found, _ = val_source.load(self.seed)
            val.append(replace(found, typed_at=place))
        return train, val


def _check_labels(labels: Sequence[str]) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(
            f"two sources are called {', '.join(map(repr, twice))}: set their labels in "
            f"data.init_args"
        )
