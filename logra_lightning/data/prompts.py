"""Prompts of stored data sets: `PromptSource`, and `PromptDataModule` with one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from logra_lightning.data.encode import PromptTemplate
from logra_lightning.data.module import TokenizedDataModule
from logra_lightning.data.read import default_label, read_rows
from logra_lightning.data.source_rows import Rows, SourceRows
from logra_lightning.data.where import told_at


@dataclass
class PromptSource:
    """One data set of a mix.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        name: configuration of the data set on the hub.
        split: split of the data set, or a slice of one such as `test[:200]`.
        columns: new column name to the old one, for instance `{answer: solution}`, or to a field in
            a nested column, for instance `{answer: reward_model.ground_truth}`.
        prompt_column: column with the prompt, which is a string or a list of messages.
        weight: share of the training prompts, relative to the other sources. In validation every
            prompt comes once.
        label: name of the source, written into the column `source` of rows that have none. Without
            it, each row's column `data_source`, or the last part of `path`.
        system_prompt: system message for prompts that have none; without it, the data module's.
        prompt_template: text of the prompt, with columns in braces; without it, the data module's.
        val_size: number of rows, the last ones, to hold out for validation.
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

    def check(self, seed: int) -> None:
        """Raise ValueError for an option out of range.

        Args:
            seed: the data module's; a stored data set does not depend on it, `GymSource` does.
        """
        if not 0 < self.weight < math.inf or self.val_size < 0:
            raise ValueError(
                f"{self.path!r} needs a positive weight and val_size not negative, got "
                f"{self.weight} and {self.val_size}"
            )
        if self.prompt_template is not None:
            PromptTemplate(self.prompt_template)

    @property
    def known_as(self) -> str:
        """The label, or the last part of the path where there is none."""
        return self.label or default_label(self.path)

    def load(self, seed: int) -> tuple[SourceRows, SourceRows]:
        """Return training and validation rows, the last `val_size` of all.

        Args:
            seed: the data module's; a stored data set does not depend on it, `GymSource` does.

        Raises:
            ValueError: the data set cannot be read, lacks a column, or has no more than `val_size`
                rows.
        """
        rows = read_rows(
            self.path, name=self.name, split=self.split, columns=self.columns, label=self.label
        )
        if self.val_size >= len(rows):
            raise ValueError(f"val_size is {self.val_size}, but {self.path!r} has {len(rows)} rows")
        cut = len(rows) - self.val_size
        return self._source_rows(rows[:cut]), self._source_rows(rows[cut:])

    def _source_rows(self, rows: Rows) -> SourceRows:
        return SourceRows(
            self.known_as, rows, self.prompt_column, self.prompt_template, self.system_prompt
        )


class PromptDataModule(TokenizedDataModule):
    """Prompts from a Hugging Face data set: a hub name, or local JSON, JSONL or parquet files.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        tokenizer: folder or hub name of the tokenizer; the command line sets it to `model.model`.
        name: configuration of the data set on the hub.
        split: split of the training prompts, or a slice of one such as `train[:1000]`.
        val_path: data set of the validation prompts, named as `path` is; without it, `path`.
        val_split: split of the validation prompts, or a slice of one; without it, `train`.
        val_size: number of training rows, the last ones, to hold out for validation; for use
            without `val_path` and `val_split`.
        prompt_column: column with the prompt, which is a string or a list of messages.
        columns: new column name to the old one, for instance `{answer: solution}`, or to a field in
            a nested column, for instance `{answer: reward_model.ground_truth}`.
        label: name of the data set, written into the column `source` of rows that have none.
            Without it, each row's column `data_source`, or the last part of `path`.
        options: further options of `TokenizedDataModule`.

    Raises:
        ValueError: at setup: the data set cannot be read, lacks a column, or has a prompt that is
            empty or too long.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        *,
        name: str | None = None,
        split: str = "train",
        val_path: str | None = None,
        val_split: str | None = None,
        val_size: int = 0,
        prompt_column: str = "prompt",
        columns: dict[str, str] | None = None,
        label: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        if val_size < 0 or (val_size and (val_path or val_split)):
            raise ValueError(
                "val_size must not be negative, and holds rows out of the training split: use it "
                "without val_path and val_split"
            )
        self.source = PromptSource(
            path, name, split, columns, prompt_column, label=label, val_size=val_size
        )
        self.val_source: PromptSource | None = None
        if val_path or val_split:
            self.val_source = PromptSource(
                val_path or path, name, val_split or "train", columns, prompt_column, label=label
            )

    @told_at("data.init_args")
    def load_rows(self) -> tuple[list[SourceRows], list[SourceRows]]:
        train, val = self.source.load(self.seed)
        if self.val_source is not None:
            val, _ = self.val_source.load(self.seed)
        return [train], [val]
