"""`AtomicCheckpointIO`: checkpoints that are whole or not there, written without a second copy."""

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
    """A checkpoint could not be written; the ones before it are untouched."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final file, and renames once all is on the disk.

    Whenever a run is killed, what was saved before can be loaded. The checkpoint goes to the file
    piece by piece, and comes from it by memory mapping. Files elsewhere than on a local or mounted
    disk (`s3://...`) are handled as Lightning does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_good: Path | None = None
        self._loaded: Path | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; the first one says how large it is.

        Raises:
            CheckpointNotWrittenError: no space, no permission and the like.
        """
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path, start = Path(path), time.perf_counter()
        partial = path.with_name(f".{path.name}{_PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._last_good is None:
                for left in path.parent.glob(f".*{_PARTIAL}"):  # of a run that was killed
                    left.unlink()
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:  # torch's writer hides the first in the second
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
        """Read a checkpoint; what is not used never enters memory.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is no checkpoint, or a part of one.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no checkpoint {path}: set ckpt_path to one")
        found = read_checkpoint(path, weights_only=weights_only is not False)
        self._loaded = Path(path)
        return found


def read_checkpoint(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """What is in a checkpoint file, its tensors mapped from there.

    Raises:
        ValueError: the file is no checkpoint, or a part of one.
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
    """Let the rename last through a power failure, where system and file system can."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the checkpoint itself is whole
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
