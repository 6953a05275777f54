"""Reads the rows of a data set: a hub name, a folder, or a JSON, JSONL or parquet file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logra_lightning.data.tokenized_prompts import column_names

_FILES = (".json", ".jsonl", ".parquet")


def read_rows(
    path: str,
    *,
    name: str | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    label: str | None = None,
) -> list[dict[str, Any]]:
    """Return all rows, with columns renamed, each with a column `source`.

    A row that already has a column `source` keeps it. Any other gets `label`; without a label, the
    value of its column `data_source`; without that, the `default_label` of the path.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        name: configuration of the data set on the hub.
        split: split of the data set, or a slice of one such as `train[:100]`.
        columns: new column name to the old one, or to a field in a nested column. For
            `{answer: reward_model.ground_truth}`, a row `{"reward_model": {"ground_truth": "34"}}`
            keeps `reward_model` and also gets `"answer": "34"`.
        label: name of the source.

    Raises:
        ValueError: there is nothing to read, or no row has a column that `columns` names.
    """
    rows = _load(os.path.expanduser(path), name, split)
    rows = _renamed(rows, columns or {}, path)
    for row in rows:
        row.setdefault("source", label or row.get("data_source") or default_label(path))
    return rows


def default_label(path: str) -> str:
    """Return the last part of a path: `gsm8k` for `openai/gsm8k` and for `data/gsm8k.jsonl`."""
    last = Path(path)
    return last.stem if last.suffix in _FILES else last.name


def _load(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
    suffix = Path(path).suffix
    if suffix in _FILES:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path!r}: mend its path")
        if Path(path).stat().st_size == 0:
            raise ValueError(f"{path!r} is empty")
    # `datasets` would make 2 of "2" in a column of mixed types, and objects of dates.
    if suffix in (".json", ".jsonl"):
        rows = _slice(_parse(path), split)
    elif suffix == ".parquet":
        files = {split.partition("[")[0]: path}
        rows = _load_dataset(path, split, path="parquet", data_files=files)
    else:
        rows = _load_dataset(path, split, path=path, name=name)
    if not rows:
        raise ValueError(f"{path!r} has no rows in split {split!r}")
    return rows


def _load_dataset(shown_path: str, split: str, **arguments: Any) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return load_dataset(**arguments, split=split).to_list()
    except Exception as error:
        cause = error.__cause__ or error
        raise ValueError(
            f"cannot read {shown_path!r} (split {split!r}): {cause or type(cause).__name__}"
        ) from error


def _parse(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON list, or of a file with a JSON object on each line."""
    text = Path(path).read_text(encoding="utf-8-sig")
    is_list = text.lstrip().startswith("[")
    # `splitlines` would also split at other characters that a JSON string may hold.
    numbered = [(1, text)] if is_list else enumerate(text.split("\n"), start=1)
    rows: list[dict[str, Any]] = []
    for number, part in numbered:
        try:
            found = json.loads(part) if part.strip() else []
        except ValueError as error:
            raise ValueError(f"cannot read {path!r}, line {number}: {error}") from error
        rows += found if isinstance(found, list) else [found]
    odd = [row for row in rows if not isinstance(row, dict)]
    if odd:
        raise ValueError(f"{path!r} must hold objects with columns, got {odd[0]!r}")
    return rows


def _slice(rows: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """What `train[2:4]`, `train[:30%]` or `train[-2:]` says of the rows; all for `train`."""
    found = re.fullmatch(r"[^\[\]+]+(\[(?P<start>-?\d+%?)?:(?P<end>-?\d+%?)?\])?", split)
    if found is None:
        raise ValueError(
            f"split of a file must be a name with or without one slice, such as train[:100] or "
            f"train[:50%], got {split!r}"
        )
    start, end = (_bound(found[name], len(rows)) for name in ("start", "end"))
    return rows[start:end]


def _bound(text: str | None, size: int) -> int | None:
    if text is None:
        return None
    return round(int(text[:-1]) / 100 * size) if text.endswith("%") else int(text)


def _renamed(
    rows: list[dict[str, Any]], columns: Mapping[str, str], path: str
) -> list[dict[str, Any]]:
    names = column_names(rows)
    for old in columns.values():
        if old not in names and all(_field(row, old) is None for row in rows):
            raise ValueError(
                f"columns names {old!r}, but {path!r} has "
                f"{', '.join(map(repr, names))}{_fields_of(rows, old)}"
            )
    moved = [old for old in columns.values() if old in names]
    return [
        {name: value for name, value in row.items() if name not in moved}
        | {new: _field(row, old) for new, old in columns.items()}
        for row in rows
    ]


def _field(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field in a nested column; None where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _fields_of(rows: list[dict[str, Any]], name: str) -> str:
    """For an error about `a.b`: the fields that the nested column `a` does have."""
    column = name.partition(".")[0]
    nested = [row[column] for row in rows if isinstance(row.get(column), Mapping)]
    fields = list(dict.fromkeys(f"{column}.{key}" for value in nested for key in value))
    return f", and in it {', '.join(map(repr, fields))}" if fields else ""
