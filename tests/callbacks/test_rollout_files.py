"""Rollout files are readable after kills, resumes and full disks."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from logra_lightning.callbacks.rollout_files import RolloutFiles
from tests.conftest import ROOT


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def rows(step: int, count: int = 2) -> list[dict[str, Any]]:
    return [{"step": step, "completion": f"{step}.{i}"} for i in range(count)]


def filled(folder: Path, steps: int) -> RolloutFiles:
    files = RolloutFiles(folder)
    for step in range(1, steps + 1):
        files.append(rows(step))
    return files


@pytest.mark.parametrize("text", ['a "quote"\n\t\\', "\x00\u2028é€", "\ud83d", "日本"])
def test_any_text_comes_back_from_one_line(tmp_path: Path, text: str) -> None:
    files = RolloutFiles(tmp_path / "made" / "for it")
    files.append([{"step": 1, "completion": text, "rewards": {"a": math.nan, "b": -math.inf}}])
    assert files.path.read_bytes().count(b"\n") == 1
    assert read(files.path) == [{"step": 1, "completion": text, "rewards": {"a": None, "b": None}}]


def test_letters_stay_readable(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path)
    files.append([{"step": 1, "completion": "é"}])
    assert '"é"' in files.path.read_text(encoding="utf-8")


@pytest.mark.faults
@pytest.mark.parametrize("left_over", [b"", b'{"step": 3, "compl', b"\x00\x00\x00\n", b"3\n"])
def test_a_resume_drops_what_is_made_again_and_half_a_line(
    tmp_path: Path, left_over: bytes
) -> None:
    filled(tmp_path, 5)
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(left_over)
    files = RolloutFiles(tmp_path)
    files.resume(3)
    files.append(rows(4))
    assert read(files.path) == [row for step in (1, 2, 3, 4) for row in rows(step)]


@pytest.mark.faults
def test_a_resume_at_the_last_step_drops_only_the_half_line(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-1])  # a row that lacks its end alone is not whole
    RolloutFiles(tmp_path).resume(3)
    assert read(path) == [*rows(1), *rows(2), rows(3)[0]]


def test_a_new_run_leaves_the_rows_of_another_one(tmp_path: Path) -> None:
    for run in range(3):
        files = RolloutFiles(tmp_path, "_process1")
        files.resume(0)
        files.append(rows(run + 1))
    assert read(tmp_path / "rollouts_process1.1.jsonl") == rows(1)
    assert read(tmp_path / "rollouts_process1.2.jsonl") == rows(2)
    assert read(tmp_path / "rollouts_process1.jsonl") == rows(3)


def test_a_validation_replaces_its_file(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, "_process0")
    for count in (3, 1):
        files.write("eval_7", [{"row": i} for i in range(count)])
    assert [path.name for path in tmp_path.iterdir()] == ["eval_7_process0.jsonl"]
    assert read(tmp_path / "eval_7_process0.jsonl") == [{"row": 0}]


KILLED = """
import sys
from pathlib import Path
from logra_lightning.callbacks.rollout_files import RolloutFiles
files, step = RolloutFiles(Path(sys.argv[1])), 0
while True:
    step += 1
    files.append({"step": step, "completion": "x" * 10_000} for _ in range(200))
"""


@pytest.mark.faults
def test_a_killed_run_leaves_rows_that_can_be_read(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    path = tmp_path / "rollouts.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size > 8_000_000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    files = RolloutFiles(tmp_path)
    files.resume(3)
    assert [row["step"] for row in read(path)] == [1] * 200 + [2] * 200 + [3] * 200


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow above so many bytes; what fits is written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.faults
def test_a_full_disk_is_told_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    files = filled(tmp_path, 2)
    full = files.path.stat().st_size + 100_010
    with disk_of(full), pytest.warns(UserWarning, match="no longer written to .* goes on"):
        files.append(rows(3, count=10_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files.append(rows(4))
        files.write("eval_4", rows(4))
    assert read(files.path) == [*rows(1), *rows(2)]
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


@pytest.mark.faults
def test_a_validation_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path)
    files.write("eval_1", rows(1))
    with disk_of(1000), pytest.warns(UserWarning, match="no longer written"):
        files.write("eval_1", rows(1, count=1000))
    assert [path.name for path in tmp_path.iterdir()] == ["eval_1.jsonl"]
    assert read(tmp_path / "eval_1.jsonl") == rows(1)


def test_a_folder_that_cannot_be_made_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = RolloutFiles(tmp_path / "file" / "folder")
    files.resume(0)
    with pytest.warns(UserWarning, match="no longer written"):
        files.append(rows(1))
