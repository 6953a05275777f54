"""`AtomicCheckpointIO`: writes checkpoints that are either whole or not there at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

_PARTIAL = ".partial"


class CheckpointNotWrittenError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a hidden file, and renames that once everything is on the disk.

    So a run that is killed while it saves still has its earlier checkpoints. The checkpoint goes to
    the file piece by piece, without a copy of all of it in memory, and is read by memory mapping.
    Checkpoints on remote storage (`s3://...`) are left to Lightning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_good: Path | None = None
        self._loaded: Path | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; the first one of a run also prints its size and the time it took.

        Raises:
            CheckpointNotWrittenError: the disk is full, permission is missing, or the like.
        """
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path, start = Path(path), time.perf_counter()
        partial = path.with_name(f".{path.name}{_PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._last_good is None:
                for left in path.parent.glob(f".*{_PARTIAL}"):  # left by a run that was killed
                    left.unlink()
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:  # torch's writer may hide an OSError in one
            partial.unlink(missing_ok=True)
            raise self._not_written(path, error) from error
        if self._last_good is None:
            rank_zero_info(
                f"checkpoint: {path}, {_megabytes(path.stat().st_size)} in "
                f"{time.perf_counter() - start:.1f} s ({_shares(checkpoint)})"
            )
        self._last_good = path

    def _not_written(self, path: Path, error: BaseException) -> CheckpointNotWrittenError:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        reason = f"{cause.strerror}" if cause is not None else f"{error}".splitlines()[0]
        there = next(folder for folder in path.parents if folder.exists())
        good = self._last_good or self._loaded
        kept = f"the last good one is {good}" if good else "there is no other"
        return CheckpointNotWrittenError(
            getattr(cause, "errno", None) or 5,
            f"the checkpoint {path} could not be written: {reason}, "
            f"{_megabytes(shutil.disk_usage(there).free)} are free there; {kept}. Make room, or "
            f"set dirpath of the checkpoint callback to another disk",
        )

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; tensors that nobody uses never enter memory.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: the file is not a whole checkpoint.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no checkpoint {path}: set ckpt_path to one")
        found = read_checkpoint(path, weights_only=weights_only is not False)
        self._loaded = Path(path)
        return found


def read_checkpoint(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return what is in a checkpoint file; tensors are mapped into memory, not copied.

    Args:
        path: the file.
        weights_only: refuse files with more than tensors and plain data, which could run code.

    Raises:
        ValueError: the file is not a whole checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} is not a whole checkpoint ({str(error).splitlines()[0]}): set ckpt_path to "
            f"another one"
        ) from error


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power failure, where the system and its disk can."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the checkpoint itself is whole either way
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _shares(checkpoint: dict[str, Any]) -> str:
    weights = _nbytes(checkpoint.get("state_dict"))
    optimizer = _nbytes(checkpoint.get("optimizer_states"))
    return f"weights {_megabytes(weights)}, state of the optimizer {_megabytes(optimizer)}"


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
