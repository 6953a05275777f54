"""`RolloutFiles`: JSONL files that killed runs, resumed runs and full disks leave readable."""

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
    """`rollouts.jsonl`, to which each step adds its rows, and files of one validation each.

    Rows are JSON objects, one a line, in UTF-8; numbers that are not finite become null. A failed
    write (a full disk, say) is taken back and told once, and nothing is written after it.

    Args:
        folder: is made when it is needed.
        suffix: of the files' names, for instance `_rank1`.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder
        self.suffix = suffix
        self.path = folder / f"rollouts{suffix}.jsonl"
        self._failed = False

    def resume(self, step: int) -> None:
        """Go on after `step`: what comes later, and half a line at the end, is cut off.

        A run that starts at step 0 is a new one and keeps what it finds, under the first free name
        of `rollouts.1.jsonl`, `rollouts.2.jsonl` and so on.
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
        """Add the rows of one step, each with its `step`."""
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
        """Make or replace `<name><suffix>.jsonl`, all of it or nothing."""
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
    # A lone surrogate has no UTF-8; as `\ud83d`, this escape of Python's is JSON's as well.
    return "".join(line + "\n" for line in dumps).encode(errors="backslashreplace")


def _plain(value: Any) -> Any:
    """With None for every number that JSON has not."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of(step: int, path: Path) -> int:
    """Bytes up to the end of the last whole row of `step` or before."""
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
    """None where the line is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
