"""`Preemption`: on SIGTERM, saves a checkpoint and ends the run with exit code 143."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from logra_lightning.callbacks.save_now import save_now
from logra_lightning.checkpoints.interruption import may_interrupt
from logra_lightning.distributed.processes import of_all_processes

_EXIT_CODE = 128 + signal.SIGTERM
_TOGETHER_S = 2.0  # signals that come within this time count as one


class PreemptedError(SystemExit):
    """The run was told to end; all processes raise it at the same place."""


class Preemption(Callback):
    """Saves a checkpoint and ends the run on SIGTERM.

    Clusters send SIGTERM some time before they take a machine away. A run of one process stops at
    once, even in the middle of sampling or of a backward pass. The checkpoint then holds the state
    before the batch, and a resumed run makes the batch again. Only the update of the weights is
    finished first. A run of several processes finishes the batch first; it is enough that one of
    them gets the signal. So ask the cluster for more time between SIGTERM and the end than a batch
    takes. A second SIGTERM within two seconds changes nothing, since some launchers send two; a
    later one ends the process on the spot.

    The checkpoint is saved by the run's checkpoint callbacks, and where none of them saves on
    exceptions by `save_now`, so that `ckpt_path=last` finds it. With
    `trainer.enable_checkpointing=false`, in a `fast_dev_run` and before the first step nothing is
    saved, and the log says so. SIGUSR1, by which Lightning requeues jobs on SLURM, is left alone.
    """

    def __init__(self) -> None:
        self._told = False
        self._told_at = 0.0
        self._may_stop = False
        self._alone = True
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A signal that came while the model was loaded is known to Lightning.
        self._told, self._may_stop = trainer.received_sigterm, False
        self._alone = trainer.world_size == 1
        if threading.current_thread() is threading.main_thread():
            # Lightning's own handler talks to the other processes, whatever they are doing.
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._told:
            self._told, self._told_at = True, time.monotonic()
        elif time.monotonic() - self._told_at > _TOGETHER_S:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._stop_in_batch()

    def _stop_in_batch(self) -> None:
        if self._told and self._alone and self._may_stop and may_interrupt():
            self._may_stop = False
            raise PreemptedError(_EXIT_CODE)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_told(trainer)
        self._may_stop = True

    def on_before_backward(self, *_: Any) -> None:
        self._stop_in_batch()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._before is not None:
            self._stop_if_told(trainer)

    def _stop_if_told(self, trainer: Trainer) -> None:
        if any(of_all_processes(self._told)):
            environment = getattr(trainer.strategy, "cluster_environment", None)
            # Lightning kills its first process when another ends with an error.
            subordinate = trainer.global_rank > 0 and isinstance(environment, LightningEnvironment)
            raise PreemptedError(0 if subordinate else _EXIT_CODE)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self._may_stop = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, PreemptedError):
            self._restore()
            return
        # Printed here and not in the handler, which may interrupt a write to the same stream. Our
        # handler stays while the checkpoint is saved; then Lightning restores the one before.
        self._may_stop = False
        reason = _why_nothing_is_saved(trainer)
        if reason:
            what = f"without a checkpoint, since {reason}"
        else:
            path = save_now(trainer, pl_module, exception)
            what = f"its checkpoint is {path}; go on with ckpt_path=last"
        rank_zero_info(f"SIGTERM: the run ends with exit code {_EXIT_CODE}; {what}.")

    def _restore(self) -> None:
        self._may_stop = False
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def _why_nothing_is_saved(trainer: Trainer) -> str:
    """Why a run that is stopped leaves no checkpoint; empty where it does."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return "trainer.fast_dev_run saves none"
    if not trainer.checkpoint_callbacks:
        return "trainer.enable_checkpointing is false"
    return "" if trainer.global_step else "no step has been made yet"
