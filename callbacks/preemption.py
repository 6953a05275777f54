"""`Preemption`: on SIGTERM the run saves a checkpoint and ends with exit code 143."""

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

from logra_lightning.checkpoints.interruption import may_interrupt
from logra_lightning.distributed.processes import of_all_processes

_EXIT_CODE = 128 + signal.SIGTERM
_TOGETHER_S = 2.0


class PreemptedError(SystemExit):
    """The run was told to end; all ranks raise it at the same place."""


class Preemption(Callback):
    """Ends a run on SIGTERM, as clusters send it before they take a machine away.

    One process stops at once, in the middle of sampling or of a backward pass too: a checkpoint of
    before the batch is saved, and the batch is made again on resume. In the update itself, and with
    several ranks, the batch is finished first, so give jobs a grace time of more than a batch; any
    one rank may get the signal. Another SIGTERM, seconds later, ends the process on the spot; some
    launchers send a second one with the first.

    The checkpoint is saved by a `ModelCheckpoint` with `save_on_exception`, such as
    `StepCheckpoint`. SIGUSR1, by which Lightning requeues jobs on SLURM, is left alone.
    """

    def __init__(self) -> None:
        self._told = False
        self._told_at = 0.0
        self._may_stop = False
        self._alone = True
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One that came while the model was loaded is known to Lightning.
        self._told, self._may_stop = trainer.received_sigterm, False
        self._alone = trainer.world_size == 1
        if threading.current_thread() is threading.main_thread():
            # Lightning's own talks to the other ranks from within, whatever they are doing.
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
        # Not in the handler, which may have come in the middle of writing to the same stream. Ours
        # stays while the checkpoint is saved; then Lightning restores what was there before.
        self._may_stop = False
        rank_zero_info(
            f"SIGTERM: the run saves a checkpoint and ends with exit code {_EXIT_CODE}; go on with "
            f"ckpt_path=last."
        )

    def _restore(self) -> None:
        self._may_stop = False
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
