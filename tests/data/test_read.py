"""Rows arrive as the file holds them; columns are found by name, also inside of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logra_lightning.data.read import default_label, read_rows
from tests.data.rows import ROWS, write

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_all_formats_give_the_same_rows(tmp_path: Path, suffix: str) -> None:
    from datasets import Dataset

    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write(path, ROWS)
    else:
        dataset = Dataset.from_list(ROWS)
        dataset.to_parquet(path) if suffix == "parquet" else dataset.to_json(path)
    assert read_rows(str(path), label="sums") == [{**row, "source": "sums"} for row in ROWS]


def test_uneven_rows_nested_values_and_none_arrive_untouched(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "6", "extra": {"a": 1}, "answer": "2024-01-02", "source": "mine"},
        {"prompt": messages, "extra": {"b": [1, {"c": None}]}, "answer": 7, "source": None},
        {"prompt": "true", "extra": None, "answer": "7", "more": "a\u2028b", "source": "mine"},
    ]
    assert read_rows(write(tmp_path / "rows.jsonl", rows), label="other") == rows
    (tmp_path / "raw.jsonl").write_text('{"x": "a\u2028b"}\r\n\n{"x": 2}', encoding="utf-8")
    assert [r["x"] for r in read_rows(str(tmp_path / "raw.jsonl"))] == ["a\u2028b", 2]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(10)),
        ("train[2:4]", [2, 3]),
        ("test[:30%]", [0, 1, 2]),
        ("validation[-2:]", [8, 9]),
        ("train[90%:]", [9]),
    ],
)
def test_slices_of_a_local_file(
    tmp_path: Path, suffix: str, split: str, expected: list[int]
) -> None:
    from datasets import Dataset

    path = tmp_path / f"rows.{suffix}"
    write(path, ROWS) if suffix == "jsonl" else Dataset.from_list(ROWS).to_parquet(path)
    assert [int(r["answer"]) // 2 for r in read_rows(str(path), split=split)] == list(expected)


def test_a_slice_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    for split in ("train[3]", "train[:2]+train[4:]", ""):
        with pytest.raises(ValueError, match=r"^split of a file .* such as train\[:100\]"):
            read_rows(path, split=split)
    with pytest.raises(ValueError, match="no rows in split 'train.20:.'"):
        read_rows(path, split="train[20:]")


def test_columns_are_renamed_and_take_the_place_of_others(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"a": 1, "b": 2, "c": 3}])
    (swapped,) = read_rows(path, columns={"a": "b", "b": "a"}, label="x")
    assert swapped == {"a": 2, "b": 1, "c": 3, "source": "x"}
    (replaced,) = read_rows(path, columns={"c": "a"}, label="x")
    assert replaced == {"b": 2, "c": 1, "source": "x"}


def test_fields_of_nested_columns_become_columns(tmp_path: Path) -> None:
    rows = [
        {"reward_model": {"ground_truth": "34", "style": "rule"}, "a.b": 7},
        {"reward_model": {"style": "rule"}, "a.b": 8},
        {"reward_model": None, "a.b": 9},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    found = read_rows(path, columns={"answer": "reward_model.ground_truth", "b": "a.b"})
    assert [(row["answer"], row["b"]) for row in found] == [("34", 7), (None, 8), (None, 9)]
    assert found[0]["reward_model"] == rows[0]["reward_model"]
    with pytest.raises(
        ValueError,
        match=r"names 'reward_model\.gold', but .* has 'reward_model', 'a\.b', and in it "
        r"'reward_model\.ground_truth', 'reward_model\.style'",
    ):
        read_rows(path, columns={"answer": "reward_model.gold"})


def test_source_is_label_or_data_source_or_the_name_of_the_file(tmp_path: Path) -> None:
    plain = write(tmp_path / "sums.jsonl", [{"prompt": "1"}])
    named = write(tmp_path / "named.jsonl", [{"prompt": "1", "data_source": "math_dapo"}])
    own = write(tmp_path / "own.jsonl", [{"prompt": "1", "data_source": "d", "source": "page 3"}])
    assert [row["source"] for row in read_rows(plain)] == ["sums"]
    assert [row["source"] for row in read_rows(named)] == ["math_dapo"]
    assert [row["source"] for row in read_rows(named, label="set")] == ["set"]
    assert [row["source"] for row in read_rows(own, label="set")] == ["page 3"]
    assert [default_label(p) for p in ("openai/gsm8k", "a/v1.5", "x/y.parquet", "folder/")] == [
        "gsm8k",
        "v1.5",
        "y",
        "folder",
    ]


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl", ROWS)
    assert len(read_rows("~/rows.jsonl")) == 10


def test_missing_columns_and_files_list_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"^columns names 'gold', but .* has 'prompt', 'answer'"):
        read_rows(path, columns={"answer": "gold"})
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{"prompt": ')
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"cannot read '.*bad.jsonl', line 2: Expecting value"):
        read_rows(str(tmp_path / "bad.jsonl"))
    with pytest.raises(ValueError, match=r"empty.jsonl' is empty"):
        read_rows(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"cannot read '.*no_folder' \(split 'train'\): "):
        read_rows(str(tmp_path / "no_folder"))
    (tmp_path / "numbers.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="must hold objects with columns, got 1"):
        read_rows(str(tmp_path / "numbers.json"))
    with pytest.raises(ValueError, match=r"there is no file '.*none.jsonl': mend its path"):
        read_rows(str(tmp_path / "none.jsonl"))


def test_a_json_list_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert [row["answer"] for row in read_rows(str(tmp_path / "rows.json"))] == [
        row["answer"] for row in ROWS
    ]
