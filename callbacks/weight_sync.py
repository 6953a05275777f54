"""`WeightSync`: keeps the engine's weights equal to the policy's, bit for bit."""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from logra_lightning.engines import (
    DenseSync,
    Engine,
    FactorSync,
    SharedSync,
    SyncedEngine,
    SyncMode,
)
from logra_lightning.engines.sync_modes import TrainedPolicy
from logra_lightning.names import named
from logra_lightning.optim import RowAdam
from logra_lightning.optim.row_adam import row_adam_of

_MODES: dict[str, type[SyncMode]] = {
    "factors": FactorSync,
    "shared": SharedSync,
    "dense": DenseSync,
}


class HasEngine(Protocol):
    """What `WeightSync` needs a `LightningModule` to have."""

    policy: nn.Module

    def ready_engine(self) -> Engine:
        """The engine, started."""
        ...


class WeightSync(Callback):
    """Brings the changes of each training batch to the engine when the batch ends.

    When training starts, also after a resume, the engine gets all weights. What it gets from then
    on depends on the mode:

    - `factors` (`FactorSync`): for each optimizer step the directions D (bf16), a seed and a
      scalar, which the engine merges into fp32 masters of its own. Weights that AdamW trains are
      sent whole along with them. If a step is missing, all weights are sent once, with a warning.
    - `shared` (`SharedSync`): nothing, because the policy's parameters are views of the engine's
      weights. Engine and trainer must be in one process and have one dtype.
    - `dense` (`DenseSync`): all weights that train, whole. It takes the place of `factors` where
      there is no `RowAdam`, or where the engine gives its weights back when it sleeps.

    After each sync the engine forgets what it computed from older weights. An engine that samples
    from the very weights that are trained needs no sync, and the callback says so once. The module
    must have `policy` and `ready_engine()`, as `HasEngine` says.

    Logs `sync/bytes` (bytes of weights and factors that were sent), `time/sync_s` and `sync/mode`
    (0 shared, 1 factors, 2 dense, 3 a mode of your own).

    Args:
        mode: `factors`, `shared`, `dense`, or a `SyncMode` of your own.
        verify_every: compare all weights, masters included, after every so many steps, and stop the
            run if they differ; 0 never compares.

    Raises:
        ValueError: an unknown mode or a negative `verify_every`; when training starts, a module
            without an engine, or an engine that cannot work in this mode.
    """

    def __init__(
        self,
        mode: Literal["factors", "shared", "dense"] | SyncMode = "factors",
        verify_every: int = 0,
    ) -> None:
        if not isinstance(mode, SyncMode) and mode not in _MODES:
            raise ValueError(
                f"weight_sync.mode must be one of {', '.join(_MODES)}, or a SyncMode, got {mode!r}"
            )
        if verify_every < 0:
            raise ValueError(f"weight_sync.verify_every must not be negative, got {verify_every}")
        self.mode = mode
        self.verify_every = verify_every
        self._engine: SyncedEngine | None = None
        self._engine_name = ""
        self._asked_mode = mode if isinstance(mode, SyncMode) else _MODES[mode]()
        self._mode = self._asked_mode
        self._hook: RemovableHandle | None = None
        self._bytes: list[int] = []
        self._dense_bytes = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = _module(pl_module).ready_engine()
        self._engine_name = type(engine).__name__
        optimizer = row_adam_of(trainer.optimizers)
        if optimizer is not None:  # in every mode, so that nobody keeps them through the next step
            self._hook = optimizer.register_step_post_hook(self._take_factors)
        if not isinstance(engine, SyncedEngine):
            rank_zero_info(
                f"WeightSync is inactive: {self._engine_name} samples from the weights that train."
            )
            return
        self._engine = engine
        self._mode = self._possible_mode(optimizer, engine)
        self._bytes = []
        policy = _policy(trainer, pl_module)
        self._dense_bytes = sum(p.nbytes for p in policy.model.parameters())
        start = time.perf_counter()
        nbytes = self._mode.begin(engine, policy, version=trainer.global_step)
        self._tell(policy, nbytes, time.perf_counter() - start)

    def _possible_mode(self, optimizer: RowAdam | None, engine: SyncedEngine) -> SyncMode:
        """The mode that was asked for, or `DenseSync` where factors cannot be sent."""
        mode = self._asked_mode
        if mode.as_factors and optimizer is None:
            rank_zero_info("WeightSync is dense: there are no factors without a RowAdam.")
            return DenseSync()
        if mode.as_factors and engine.sleep_mode == "weights":
            rank_zero_info("WeightSync is dense: the engine's sleep gives its weights back.")
            return DenseSync()
        return mode

    def _tell(self, policy: TrainedPolicy, nbytes: int, seconds: float) -> None:
        parameters = self._mode.parameters(policy)
        frozen = [p.name for p in parameters if not p.changes]
        leaves = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in frozen})
        told = f", {len(frozen)} are frozen ({', '.join(leaves)})" if frozen else ""
        rank_zero_info(
            f"WeightSync: {self._engine_name}, mode {self._mode.name}; "
            f"{self._mode.plan(parameters)}{told}; first sync of {nbytes:,} bytes in "
            f"{seconds:.2f} s."
        )

    def _take_factors(self, optimizer: Optimizer, *_: Any) -> None:
        assert isinstance(optimizer, RowAdam)
        factors = optimizer.take_factors()
        if factors is not None and self._engine is not None:
            self._mode.take(factors)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._engine is None:
            return
        start = time.perf_counter()
        sent = self._mode.sync(
            self._engine, _policy(trainer, pl_module), version=trainer.global_step
        )
        self._bytes.append(sent.nbytes)
        pl_module.log("sync/bytes", float(sent.nbytes))
        pl_module.log("time/sync_s", time.perf_counter() - start)
        pl_module.log("sync/mode", sent.number)
        if self.verify_every and trainer.global_step % self.verify_every == 0:
            self.verify(trainer, pl_module)

    def verify(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise RuntimeError if the engine does not hold the policy's weights bit for bit.

        Every process must call it.
        """
        assert self._engine is not None
        parameters = self._mode.parameters(_policy(trainer, pl_module))
        names = self._engine.differing(p.weight() for p in parameters)
        if names:
            raise RuntimeError(
                f"after step {trainer.global_step} the engine's weights differ from the policy's "
                f"in {len(names)}: {named(names, limit=8)}"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._engine = None, None

    def summary(self) -> str:
        """One line for the end of a run: the engine, the mode and the mean bytes per step."""
        if not self._bytes:
            return f"engine: {self._engine_name}" if self._engine_name else ""
        mean = sum(self._bytes) / len(self._bytes)
        return (
            f"engine: {self._engine_name}, weight sync {self._mode.name}: {mean:,.0f} bytes per "
            f"step, {mean / self._dense_bytes:.3f} of a dense sync"
        )


def _module(pl_module: LightningModule) -> HasEngine:
    for name in ("policy", "ready_engine"):
        if not hasattr(pl_module, name):
            raise ValueError(
                f"WeightSync needs {type(pl_module).__name__} to have `policy` (the transformers "
                f"model) and `ready_engine()` (the started engine); it has no {name!r}"
            )
    return pl_module  # type: ignore[return-value]


def _policy(trainer: Trainer, pl_module: LightningModule) -> TrainedPolicy:
    return TrainedPolicy(_module(pl_module).policy, row_adam_of(trainer.optimizers))
