"""`PromptDataModule`: prompts of one data set, from the hub or from local files."""

from __future__ import annotations

from typing import Any

from logra_lightning.data.module import Rows, SourceRows, TokenizedDataModule
from logra_lightning.data.read import default_label, read_rows


class PromptDataModule(TokenizedDataModule):
    """Prompts from a Hugging Face data set: a hub name, or local JSON, JSONL or parquet files.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        tokenizer: as in `TokenizedDataModule`.
        name: configuration of the data set on the hub.
        split: of the training prompts, also a slice such as `train[:1000]`.
        val_path: where validation prompts come from; `path` when left out.
        val_split: of the validation prompts.
        val_size: without `val_path` and `val_split`, how many of the last training rows to hold
            out for validation.
        prompt_column: holds a string or a list of messages.
        columns: new name to existing column, for instance `{answer: solution}`, or to a field
            within one, for instance `{answer: reward_model.ground_truth}`.
        label: value of the column `source`; left out, the data's own `source` or `data_source`, or
            the last part of `path`.
        options: as in `TokenizedDataModule`.

    Raises:
        ValueError: at setup: no such column, a prompt that is empty or too long, no prompts.
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
        self.prompt_column = prompt_column
        self.path = path
        self.config_name = name
        self.split = split
        self.val_path = val_path
        self.val_split = val_split
        self.val_size = val_size
        self.renamed = columns
        self.label = label

    def load_rows(self) -> tuple[Rows, Rows]:
        train = self._read(self.path, self.split)
        if self.val_path or self.val_split:
            return train, self._read(self.val_path or self.path, self.val_split or "train")
        return hold_out(train, self.val_size, self.path)

    def load_sources(self) -> tuple[list[SourceRows], list[SourceRows]]:
        train, val = self.load_rows()
        return (
            [SourceRows(self.label or default_label(self.path), train, self.prompt_column)],
            [SourceRows(self.label or default_label(self.path), val, self.prompt_column)],
        )

    def _read(self, path: str, split: str) -> Rows:
        return read_rows(
            path, name=self.config_name, split=split, columns=self.renamed, label=self.label
        )


def hold_out(rows: Rows, count: int, path: str) -> tuple[Rows, Rows]:
    """All but the last `count` rows, and those.

    Raises:
        ValueError: nothing would be left.
    """
    if count >= len(rows):
        raise ValueError(f"val_size is {count}, but {path!r} has {len(rows)} rows")
    cut = len(rows) - count
    return rows[:cut], rows[cut:]
