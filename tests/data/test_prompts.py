"""A data set becomes training and validation prompts, with a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logra_lightning.data import PromptDataModule
from tests.conftest import TINY_POLICY
from tests.data.rows import ROWS, ready, write

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def module(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> PromptDataModule:
    path = write(tmp_path / "rows.jsonl", rows)
    return PromptDataModule(path, **({"tokenizer": str(TINY_POLICY)} | options))


def test_the_last_rows_are_held_out(tmp_path: Path) -> None:
    data = ready(module(tmp_path, val_size=3))
    assert [row["answer"] for row in data.train.rows] == [row["answer"] for row in ROWS[:7]]
    assert [row["answer"] for row in data.val.rows] == ["14", "16", "18"]


def test_validation_rows_may_come_from_another_file_or_slice(tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", ROWS[:2])
    data = ready(module(tmp_path, val_path=other, columns={"gold": "answer"}))
    assert [row["gold"] for row in data.val.rows] == ["0", "2"]
    data = ready(module(tmp_path, split="train[:8]", val_split="train[8:]"))
    assert (len(data.train), len(data.val)) == (8, 2)


def test_columns_are_renamed_and_every_row_has_a_source(tmp_path: Path) -> None:
    rows = [{"problem": "1 + 1 =", "solution": "2"}]
    renamed = {"prompt": "problem", "answer": "solution"}
    data = ready(module(tmp_path, rows, columns=renamed))
    assert data.train.rows == [{"prompt": "1 + 1 =", "answer": "2", "source": "rows"}]
    data = ready(module(tmp_path, rows, columns=renamed, label="sums"))
    assert data.train.rows[0]["source"] == "sums"


def test_a_missing_prompt_column_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="^data.init_args: training row 0 has no column 'question', only 'prompt', 'answer', "
        "'level', 'source': set prompt_column$",
    ):
        ready(module(tmp_path, prompt_column="question"))


def test_what_cannot_be_read_is_told_at_its_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^data.init_args: columns names 'gold', but .* 'answer'"):
        ready(module(tmp_path, columns={"answer": "gold"}))
    with pytest.raises(ValueError, match="^data.init_args: there is no file 'none.json': mend"):
        ready(module(tmp_path, val_path="none.json"))


def test_what_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_size is 10, but .* has 10 rows"):
        ready(module(tmp_path, val_size=10))
    with pytest.raises(ValueError, match="use it without val_path and val_split"):
        module(tmp_path, val_size=1, val_split="train")
