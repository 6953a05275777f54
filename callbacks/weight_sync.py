"""`WeightSync`: keeps the engine's weights those of the policy, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from logra_lightning.distributed.sharding import whole
from logra_lightning.engines import Engine, PolicyWeight, SyncedEngine
from logra_lightning.optim import RowAdam
from logra_lightning.optim.row_adam import row_adam_of
from logra_lightning.sketch import Factors
from logra_lightning.sketch.projection import canonical_name

MODES = ("shared", "factors", "dense")


class HasEngine(Protocol):
    """What `WeightSync` asks of a `LightningModule`."""

    policy: nn.Module

    def ready_engine(self) -> Engine:
        """The engine, started."""
        ...


class WeightSync(Callback):
    """Hands each update to the engine when a training batch ends.

    When training starts, also after a resume, the engine gets all weights. From then on, in mode

    - `factors`: the directions D (bf16), a seed and a scalar for each optimizer step of the batch,
      in order; the engine merges them into fp32 masters of its own. Weights that AdamW trains
      travel densely along. A gap in the versions becomes one dense sync, with a warning.
    - `shared`: nothing; the policy's parameters are made views of the engine's weights.
    - `dense`: all weights that train. Also what happens without a `RowAdam`.

    The engine forgets its prefix cache once per sync. An engine that samples from the very weights
    that are trained needs no sync, and the callback says so once. The module must have `policy`
    and `ready_engine()`, as `HasEngine` says.

    Logs `sync/bytes` (of weights and factors that were sent), `time/sync_s` and `sync/mode` (0
    shared, 1 factors, 2 dense).

    Args:
        mode: see above.
        verify_every: compare all weights, masters included, at every so many steps and stop the
            run where they differ; 0 never does.

    Raises:
        ValueError: an unknown mode, a negative `verify_every`, or a mode that cannot be.
    """

    def __init__(
        self, mode: Literal["factors", "shared", "dense"] = "factors", verify_every: int = 0
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"weight_sync.mode must be one of {', '.join(MODES)}, got {mode!r}")
        if verify_every < 0:
            raise ValueError(f"weight_sync.verify_every must not be negative, got {verify_every}")
        self.mode = mode
        self.verify_every = verify_every
        self._engine: SyncedEngine | None = None
        self._engine_name = ""
        self._mode = mode
        self._queue: list[Factors] = []
        self._moved = False
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
        self._mode = self._possible_mode(trainer, engine)
        self._queue, self._bytes, self._moved = [], [], False
        self._dense_bytes = sum(p.nbytes for p in _module(pl_module).policy.parameters())
        start = time.perf_counter()
        if self._mode == "shared":
            engine.share(_module(pl_module).policy)
            engine.refresh(version=trainer.global_step)
        else:
            engine.load(self._weights(trainer, pl_module), version=trainer.global_step)
        self._tell(trainer, pl_module, time.perf_counter() - start)

    def _possible_mode(
        self, trainer: Trainer, engine: SyncedEngine
    ) -> Literal["factors", "shared", "dense"]:
        """The mode that was asked for, or `dense` where there can be no factors."""
        if self.mode == "factors" and row_adam_of(trainer.optimizers) is None:
            rank_zero_info("WeightSync is dense: there are no factors without a RowAdam.")
            return "dense"
        if self.mode == "factors" and engine.sleep_mode == "weights":
            rank_zero_info("WeightSync is dense: the engine's sleep gives its weights back.")
            return "dense"
        return self.mode

    def _tell(self, trainer: Trainer, pl_module: LightningModule, seconds: float) -> None:
        weights = list(self._sources(trainer, pl_module))
        frozen = [source.name for source in weights if not source.changes]
        factored = sum(source.projection is not None for source in weights)
        changing = len(weights) - len(frozen)
        parts = [f"{factored} weights travel as factors"] if self._mode == "factors" else []
        parts.append(f"{changing - factored} densely" if self._mode != "shared" else "")
        leaves = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in frozen})
        parts.append(f"{len(frozen)} are frozen ({', '.join(leaves)})" if frozen else "")
        rank_zero_info(
            f"WeightSync: {self._engine_name}, mode {self._mode}; "
            f"{', '.join(filter(None, parts)) or 'all weights are one'}; first sync of "
            f"{0 if self._mode == 'shared' else sum(w.nbytes for w in weights):,} bytes in "
            f"{seconds:.2f} s."
        )

    def _take_factors(self, optimizer: Optimizer, *_: Any) -> None:
        assert isinstance(optimizer, RowAdam)
        factors = optimizer.take_factors()
        if factors is not None and self._engine is not None:
            self._moved = self._moved or bool(factors.directions)
            if self._mode == "factors":
                self._queue.append(factors)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._engine is None:
            return
        start = time.perf_counter()
        nbytes, mode = self._sync(trainer, pl_module, self._engine)
        self._bytes.append(nbytes)
        pl_module.log("sync/bytes", float(nbytes))
        pl_module.log("time/sync_s", time.perf_counter() - start)
        pl_module.log("sync/mode", float(MODES.index(mode)))
        if self.verify_every and trainer.global_step % self.verify_every == 0:
            self.verify(trainer, pl_module)

    def _sync(
        self, trainer: Trainer, pl_module: LightningModule, engine: SyncedEngine
    ) -> tuple[int, str]:
        """Bytes that were sent, and how."""
        updates, self._queue = self._queue, []
        moved, self._moved = self._moved or row_adam_of(trainer.optimizers) is None, False
        version, held = trainer.global_step, engine.policy_version
        if self._mode == "shared":
            if held != version:
                engine.refresh(version=version)
            return 0, "shared"
        every = engine.sleep_mode == "weights"  # nothing of the old weights is left
        if self._mode == "dense" and not every and (held == version or not moved):
            engine.policy_version = version
            return 0, "dense"
        if self._mode == "factors":
            made_of = [*(factors.version for factors in updates), version]
            if made_of == [held, *(factors.version + 1 for factors in updates)]:
                return self._merge(trainer, pl_module, engine, updates), "factors"
            rank_zero_warn(
                f"the engine holds policy version {held} and the policy is {version}, but there "
                f"are factors of {made_of[:-1] or 'none'}: sending all weights"
            )
            every = True
        sent = [s for s in self._sources(trainer, pl_module) if every or s.changes]
        engine.load((source.weight() for source in sent), version=version)
        return sum(source.nbytes for source in sent), "dense"

    def _merge(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        engine: SyncedEngine,
        updates: list[Factors],
    ) -> int:
        changed = [source for source in self._sources(trainer, pl_module) if source.changes]
        names = {source.projection for source in changed}
        updates = [_only(factors, names) for factors in updates]
        moved = any(factors.directions for factors in updates)
        dense = [source for source in changed if source.projection is None and moved]
        engine.merge(updates, (source.weight() for source in dense))
        return sum(f.nbytes for f in updates) + sum(source.nbytes for source in dense)

    def _weights(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[PolicyWeight]:
        """All weights of the policy, one after the other; every rank must go through them."""
        return (source.weight() for source in self._sources(trainer, pl_module))

    def _sources(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[_Source]:
        """Where all weights of the policy come from; exact masters where factors come."""
        optimizer = row_adam_of(trainer.optimizers)
        sketched = {} if optimizer is None else optimizer.sketched_names()
        for name, parameter in _module(pl_module).policy.named_parameters():
            projection, residual = sketched.get(parameter), None
            changes = projection is not None or parameter.requires_grad
            if self._mode != "factors":
                projection = None
            elif projection is not None:
                assert optimizer is not None
                residual = optimizer.residual(parameter)
            yield _Source(canonical_name(name), parameter, residual, projection, changes)

    def verify(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise RuntimeError where the engine does not hold the policy's weights bit for bit."""
        assert self._engine is not None
        names = self._engine.differing(self._weights(trainer, pl_module))
        if names:
            raise RuntimeError(
                f"after step {trainer.global_step} the engine's weights differ from the policy's "
                f"in {len(names)}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
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
        self._hook, self._engine, self._queue = None, None, []

    def summary(self) -> str:
        """One line for the end of a run."""
        if not self._bytes:
            return f"engine: {self._engine_name}" if self._engine_name else ""
        mean = sum(self._bytes) / len(self._bytes)
        return (
            f"engine: {self._engine_name}, weight sync {self._mode}: {mean:,.0f} bytes per step, "
            f"{mean / self._dense_bytes:.3f} of a dense sync"
        )


@dataclass(frozen=True)
class _Source:
    """A weight of the policy, of which this rank may hold a part."""

    name: str
    parameter: Parameter
    residual: Tensor | None
    projection: str | None
    changes: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight and its residual."""
        size = self.parameter.element_size() + (0 if self.residual is None else 2)
        return self.parameter.numel() * size

    def weight(self) -> PolicyWeight:
        """All rows of it; every rank must call this."""
        low = None if self.residual is None else whole(self.parameter, self.residual)
        return PolicyWeight(self.name, whole(self.parameter), low, self.projection)


def _module(pl_module: LightningModule) -> HasEngine:
    for name in ("policy", "ready_engine"):
        if not hasattr(pl_module, name):
            raise ValueError(
                f"WeightSync needs {type(pl_module).__name__} to have `policy` (the transformers "
                f"model) and `ready_engine()` (the started engine); it has no {name!r}"
            )
    return pl_module  # type: ignore[return-value]


def _only(factors: Factors, names: set[str | None]) -> Factors:
    """Without what is sketched outside the policy."""
    kept = {name: d for name, d in factors.directions.items() if name in names}
    return replace(factors, directions=kept)
