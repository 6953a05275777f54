"""Which checkpoints there are, and the newest of them: what `ckpt_path=last` and a folder mean."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from logra_lightning.checkpoints.checkpoint_io import read_checkpoint


def newest(paths: Iterable[str | Path]) -> str:
    """Return the path that was written last; of several written at once, that of the highest step.

    Paths where nothing is are left out; without any other, the answer is empty.
    """
    times = {}
    for path in paths:
        with suppress(OSError):  # nothing there, or a link to nothing
            times[str(path)] = Path(path).stat().st_mtime_ns
    last = max(times.values(), default=0)
    latest = [path for path, time in times.items() if time == last]
    return max(latest, key=_step) if len(latest) > 1 else "".join(latest)


def checkpoint_at(path: str | Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one in a folder or below it.

    Raises:
        ValueError: there is none.
    """
    full = Path(path).expanduser()
    if full.is_dir() and full.suffix != ".ckpt":  # as a sharded checkpoint is called
        found = newest(full.rglob("*.ckpt"))
        if not found:
            raise ValueError(f"there is no checkpoint in the folder {str(path)!r}: set ckpt_path")
        return Path(found)
    if not full.exists():
        raise ValueError(f"there is no checkpoint {str(path)!r}: set ckpt_path to one")
    return full


def checkpoints_of_runs(trainer: Trainer) -> set[str]:
    """Return all checkpoints of the runs in the trainer's log folder, by any callback.

    A folder that a callback names (`dirpath`) takes the place of the log folder. Of numbered
    folders (`version_3`) the trainer's own counts where it has checkpoints, else all of them do.
    """
    callbacks: list[Any] = trainer.checkpoint_callbacks
    found = {c.ckpt_path for c in callbacks if isinstance(c, OnExceptionCheckpoint)}
    savers = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
    if not savers:
        return found | _in_log_folder(trainer, ["*.ckpt"])
    return found.union(*(checkpoints_like(callback, trainer) for callback in savers))


def checkpoints_like(callback: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Return all checkpoints in the folder of a callback, that of earlier runs included."""
    # A metric's name with a slash makes a folder of Lightning's own callback.
    depth = (callback.filename or "").count("/")
    patterns = sorted({"*.ckpt", "*/" * depth + "*.ckpt"})
    if callback.dirpath is not None:
        return _matching(Path(callback.dirpath), patterns)
    return _in_log_folder(trainer, patterns)


def is_remote(trainer: Trainer) -> bool:
    """Whether a run's checkpoints lie on remote storage (`s3://...`), where Lightning looks."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    folders = [getattr(callback, "dirpath", None) for callback in callbacks]
    folders += [logger.save_dir for logger in trainer.loggers] + [trainer.default_root_dir]
    return any("://" in str(folder) for folder in folders)


def chosen_checkpoint(trainer: Trainer, subcommand: str, ckpt_path: str | None) -> str | None:
    """Return the file that `ckpt_path` means on the command line.

    `last`, in a fit that finds none, stays as it is: Lightning says so, and the run begins anew.

    Args:
        trainer: made, and not run yet.
        subcommand: `fit`, `validate`, `test` or `predict`.
        ckpt_path: as it was given.

    Raises:
        ValueError: it names no checkpoint.
    """
    if ckpt_path is None or ckpt_path == "hpc" or "://" in ckpt_path or is_remote(trainer):
        return ckpt_path
    if ckpt_path.startswith("registry"):
        return ckpt_path
    if ckpt_path not in ("last", "best"):
        return str(checkpoint_at(ckpt_path))
    found = newest(checkpoints_of_runs(trainer))
    if ckpt_path == "best":
        there = f"the newest one is {found}" if found else "the log folder has none"
        raise ValueError(
            f"ckpt_path=best is known only within the program that trained: set ckpt_path to a "
            f"checkpoint; {there}"
        )
    if not found and subcommand != "fit":
        raise ValueError(
            f"ckpt_path=last finds no checkpoint to {subcommand}: set it to one, or leave it out "
            f"for the weights of model.model"
        )
    return found or ckpt_path


def run_folder(trainer: Trainer) -> Path:
    """Return the folder that a `ModelCheckpoint` without `dirpath` saves to in this run."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "checkpoints"
    version = trainer.loggers[0].version
    name = version if isinstance(version, str) else f"version_{version}"
    return _runs(trainer) / name / "checkpoints"


def _in_log_folder(trainer: Trainer, patterns: list[str]) -> set[str]:
    found = _matching(run_folder(trainer), patterns)
    if found or not trainer.loggers or isinstance(trainer.loggers[0].version, str):
        return found
    numbered = [f"version_*/checkpoints/{pattern}" for pattern in patterns]
    return _matching(_runs(trainer), numbered)


def _runs(trainer: Trainer) -> Path:
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)


def _matching(folder: Path, patterns: list[str]) -> set[str]:
    return {str(path) for pattern in patterns for path in folder.glob(pattern)}


def _step(path: str) -> int:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_checkpoint(path)["global_step"])
    return -1
