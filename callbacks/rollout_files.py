"""`RolloutFiles`: JSONL files that stay readable when a run is killed, resumed or out of disk."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class RolloutFiles:
    """Writes `rollouts.jsonl`, to which each step adds rows, and one file for each validation.

    Each line is a row, a JSON object in UTF-8; numbers that are not finite become null. When a
    write fails, for instance on a full disk, what it wrote is removed again, a warning says so
    once, and nothing is written after that.

    Args:
        folder: folder of the files; it is made when the first file is.
        suffix: end of the files' names before `.jsonl`: `_process1` makes
            `rollouts_process1.jsonl`.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder
        self.suffix = suffix
        self.path = folder / f"rollouts{suffix}.jsonl"
        self._failed = False

    def resume(self, step: int) -> None:
        """Prepare the file for a run that goes on after `step`.

        Rows of later steps are cut off, and so is a half-written line at the end. With step 0 the
        run is a new one: an old file is renamed to the first free of `rollouts.1.jsonl`,
        `rollouts.2.jsonl` and so on.
        """
        with self._told():
            if not self.path.exists():
                return
            if step > 0:
                os.truncate(self.path, _end_of(step, self.path))
            elif self.path.stat().st_size > 0:
                number = 1
                while (other := self.path.with_suffix(f".{number}.jsonl")).exists():
                    number += 1
                self.path.rename(other)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of one step to `rollouts.jsonl`; each row has an entry `step`."""
        if self._failed:
            return
        lines = _lines(rows)
        with self._told():
            self.folder.mkdir(parents=True, exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("ab") as file:
                    file.write(lines)
            except OSError:
                with suppress(OSError):
                    os.truncate(self.path, size)
                raise

    def write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make or replace the file `<name><suffix>.jsonl`; it is written whole or not at all."""
        if self._failed:
            return
        path = self.folder / f"{name}{self.suffix}.jsonl"
        draft = path.with_suffix(".part")
        with self._told():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_bytes(_lines(rows))
                draft.replace(path)
            except OSError:
                with suppress(OSError):
                    draft.unlink()
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            warnings.warn(
                f"rollouts are no longer written to {self.folder} ({error}); the training goes on",
                stacklevel=4,
            )


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    dumps = (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) for row in rows)
    # A lone surrogate cannot be written in UTF-8. Python escapes it as `\ud83d`, and so does JSON.
    return "".join(line + "\n" for line in dumps).encode(errors="backslashreplace")


def _plain(value: Any) -> Any:
    """The value with None in the place of every number that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of(step: int, path: Path) -> int:
    """Number of bytes up to the end of the last whole row whose step is at most `step`."""
    end = offset = 0
    with path.open("rb") as file:
        for line in file:
            offset += len(line)
            found = _step_of(line)
            if found is not None and found > step:
                break
            if found is not None:
                end = offset
    return end


def _step_of(line: bytes) -> int | None:
    """The step of a row, None where the line is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
