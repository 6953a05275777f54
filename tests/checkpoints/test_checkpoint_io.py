"""A checkpoint is whole or not there, and the one before it stays."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from logra_lightning.checkpoints.checkpoint_io import (
    AtomicCheckpointIO,
    CheckpointNotWrittenError,
    read_checkpoint,
)
from tests.warm import Warm

pytestmark = pytest.mark.faults

BIG = 64_000_000  # bytes of a checkpoint that takes a while to write


def checkpoint(value: float, size: int = 1000) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((size // 4,), float(value))}, "global_step": int(value)}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "a.ckpt"
    io.save_checkpoint(checkpoint(1), path)
    first = io.load_checkpoint(path)
    io.save_checkpoint(checkpoint(2), path)  # over a file that is mapped
    assert torch.equal(first["state_dict"]["w"], torch.full((250,), 1.0))
    first["state_dict"]["w"].fill_(7)  # changes no file
    assert io.load_checkpoint(path, weights_only=True)["global_step"] == 2
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 2
    assert [p.name for p in path.parent.iterdir()] == ["a.ckpt"]


def test_the_first_checkpoint_says_its_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = AtomicCheckpointIO()
    with caplog.at_level("INFO"):
        for step in (1, 2):
            io.save_checkpoint(
                checkpoint(step, 3_000_000) | {"optimizer_states": [{"v": torch.zeros(250_000)}]},
                tmp_path / f"{step}.ckpt",
            )
    messages = [m for m in caplog.messages if "checkpoint:" in m]
    assert len(messages) == 1
    assert "1.ckpt, 4.0 MB in" in messages[0]
    assert "(weights 3.0 MB, state of the optimizer 1.0 MB)" in messages[0]


def save_again_and_again(path: Path) -> None:
    step = 2
    while True:
        AtomicCheckpointIO().save_checkpoint(checkpoint(step, BIG), path)
        step += 1


def test_a_killed_save_leaves_the_previous_checkpoint(warm: Warm, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(1, BIG), path)
    partial = tmp_path / ".last.ckpt.partial"
    run = warm.begin(save_again_and_again, path, output=tmp_path / "output.txt")
    while not (partial.exists() and partial.stat().st_size > 1_000_000):
        assert run.poll() is None, run.output.read_text()
    run.kill()
    found = AtomicCheckpointIO().load_checkpoint(path)
    assert (found["state_dict"]["w"] == found["global_step"]).all()
    AtomicCheckpointIO().save_checkpoint(checkpoint(9), path)
    assert not partial.exists()  # what a kill left is cleared away


def test_a_full_disk_says_so_and_keeps_the_last_good_one(tmp_path: Path) -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint(checkpoint(1), tmp_path / "good.ckpt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(
            CheckpointNotWrittenError,
            match=r"bad.ckpt could not be written: File too large, .* MB are free there; the last "
            r"good one is .*good.ckpt. Make room",
        ) as caught:
            io.save_checkpoint(checkpoint(2, BIG), tmp_path / "bad.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["good.ckpt"]


def test_no_space_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointNotWrittenError, match="No space left on device, .* no other"):
        AtomicCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(1), path)
    path.write_bytes(path.read_bytes()[:-500])
    for damaged in (path, tmp_path / "empty.ckpt"):
        damaged.touch()
        with pytest.raises(ValueError, match=f"{damaged.name} is not a whole checkpoint"):
            read_checkpoint(damaged)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*b.ckpt: set ckpt_path"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")


def test_after_a_resume_the_one_that_was_loaded_is_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AtomicCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "good.ckpt")
    io = AtomicCheckpointIO()
    io.load_checkpoint(tmp_path / "good.ckpt")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointNotWrittenError, match="the last good one is .*good.ckpt"):
        io.save_checkpoint(checkpoint(2), tmp_path / "a.ckpt")


def test_a_file_system_that_cannot_sync_folders_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def files_only(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    io = AtomicCheckpointIO()
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1
