"""`RunSummary`: prints the last lines of a run, with its result and where to find everything."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from logra_lightning.checkpoints.newest import newest


class RunSummary(Callback):
    """Prints, when training ends, what changed, how long a step took, and where the files are.

    For instance:

        eval/pass@1: 0.125 at step 0, 0.750 at step 100
        seconds per step: 1.52 (median of 100)
        checkpoint: runs/quickstart/version_0/checkpoints/last.ckpt

    A callback with a method `summary() -> str` adds its own line.

    Args:
        metric: name of a validation metric; its first and its last value are printed.
    """

    def __init__(self, metric: str = "eval/pass@1") -> None:
        self.metric = metric
        self._values: list[tuple[int, float]] = []
        self._step_s: list[float] = []
        self._started = 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self.metric in trainer.callback_metrics:
            value = trainer.callback_metrics[self.metric].item()
            self._values.append((trainer.global_step, value))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step_s.append(time.perf_counter() - self._started)

    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print("\n".join(["", *self.lines(trainer)]), flush=True)

    def lines(self, trainer: Trainer) -> list[str]:
        """The lines that are printed."""
        lines = []
        if self._values:
            (first_step, first), (last_step, last) = self._values[0], self._values[-1]
            after = f", {last:.3f} at step {last_step}" if last_step > first_step else ""
            lines.append(f"{self.metric}: {first:.3f} at step {first_step}{after}")
        if self._step_s:
            median = statistics.median(self._step_s)
            lines.append(f"seconds per step: {median:.2f} (median of {len(self._step_s)})")
        told = [getattr(callback, "summary", str)() for callback in trainer.callbacks]  # type: ignore[attr-defined]
        lines += [line for line in told if line]
        saved = _newest_saved(trainer)
        lines.append(f"checkpoint: {_short(saved) if saved else 'none saved'}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                lines.append(f"TensorBoard logs: {_short(logger.log_dir)}")
                lines.append(f"watch them: tensorboard --logdir {_short(logger.root_dir)}")
        return lines


def _newest_saved(trainer: Trainer) -> str:
    """The newest checkpoint of the run, which is the one that `ckpt_path=last` goes on from."""
    names = "_last_checkpoint_saved", "last_model_path", "best_model_path"
    saved = [getattr(c, name, "") for c in trainer.checkpoint_callbacks for name in names]
    return newest(filter(None, saved)) or next(filter(None, saved), "")  # not on this disk


def _short(path: str) -> str:
    """The path relative to the working directory, absolute where it lies elsewhere."""
    absolute = Path(path).absolute()
    if absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(absolute)
