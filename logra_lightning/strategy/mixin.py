"""`SketchMixin`: what makes a Lightning strategy own the sketches of the weights.

It goes in front of the strategy. It freezes the targets, so that no dense gradient of theirs ever
exists, hooks them when training is set up, and starts the next step's sums after each optimizer
step. It works with any `LightningModule` in manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO
from logra_lightning.distributed.gradients import sum_dense_gradients_
from logra_lightning.distributed.processes import (
    num_processes,
    of_all_processes,
    sum_over_processes_,
)
from logra_lightning.distributed.sharding import is_sharded
from logra_lightning.optim.row_adam import RowAdam
from logra_lightning.sketch.bank import DEFAULT_TARGETS, SketchBank, find_targets
from logra_lightning.sketch.capture import SketchCapture
from logra_lightning.strategy.parent_watch import exit_with_parent

_SUPPORTED_PRECISION = ("32-true", "bf16-mixed", "bf16-true")


class SketchMixin(Strategy):
    """What makes a strategy a sketching one.

    Args:
        rank: columns of every sketch; at most the in_features of every target. Memory and time
            grow with it, noise falls with it.
        targets: last parts of the names of the linear layers to sketch. Embeddings and the output
            head cannot be.
        projection: `rademacher` (random signs) or `gaussian` (four times the memory).
        projection_seed: of the projections, the same on every rank.
        options: of the strategy behind it; most are given by the Trainer.

    Attributes:
        sketches: the bank during `fit`, else None.
        shards_weights: whether each rank holds a part of the weights only, so that ranks must make
            forward passes together.
    """

    sketches: SketchBank | None = None
    shards_weights = False
    _capture: SketchCapture | None = None
    _sketched: dict[str, nn.Linear] | None = None

    def __init__(
        self,
        rank: int = 256,
        targets: Sequence[str] = DEFAULT_TARGETS,
        projection: Literal["rademacher", "gaussian"] = "rademacher",
        projection_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        if rank < 1:
            raise ValueError(f"sketch rank must be at least 1, got {rank}")
        self.rank = rank
        self.targets = list(targets)
        self.projection = projection
        self.projection_seed = projection_seed

    def connect(self, model: LightningModule) -> None:
        """Refuse what cannot work while nothing has been set up yet."""
        super().connect(model)
        trainer = model.trainer
        if model.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__} needs manual optimization: set "
                f"self.automatic_optimization = False in {type(model).__name__}, call "
                f"self.manual_backward for each microbatch and self.optimizers().step() once"
            )
        check_trainer_options(trainer)
        if self.precision_plugin.precision not in _SUPPORTED_PRECISION:
            raise ValueError(
                f"sketches support trainer.precision {', '.join(_SUPPORTED_PRECISION)}, got "
                f"{self.precision_plugin.precision}"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        environment = getattr(self, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            exit_with_parent()  # where nobody else started the processes

    def freeze_targets(self) -> dict[str, nn.Linear]:
        """Leave the sketched weights without a gradient of their own, once; name to module."""
        if self._sketched is None:
            modules = find_targets(self._module, self.targets)
            # A frozen copy, such as a reference model, is none of our business.
            modules = {name: m for name, m in modules.items() if m.weight.requires_grad}
            if not modules:
                raise ValueError(
                    f"all weights called {', '.join(self.targets)} are frozen: leave "
                    f"requires_grad=True on those to sketch"
                )
            for module in modules.values():
                module.weight.requires_grad_(False)
            self._sketched = modules
        return self._sketched

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Freeze and hook the targets, then let the module configure its optimizer."""
        self.sketches = SketchBank(
            self.freeze_targets(),
            self.rank,
            seed=self.projection_seed,
            projection=self.projection,
            device=self.root_device,
        )
        self._capture = SketchCapture(self.sketches)
        super().setup_optimizers(trainer)
        optimizers = trainer.optimizers
        own = [o for o in optimizers if isinstance(o, RowAdam) and o.sketches is self.sketches]
        if len(optimizers) != 1 or not own:
            raise ValueError(
                f"{type(self).__name__} needs exactly one optimizer, a RowAdam on "
                f"self.trainer.strategy.sketches; configure_optimizers returned "
                f"{', '.join(type(o).__name__ for o in optimizers) or 'none'}. RowAdam trains the "
                f"other parameters by AdamW"
            )

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.sketches is not None
        self.sketches.require_step()
        fingerprints = of_all_processes(self.sketches.fingerprint())
        if len(set(fingerprints)) > 1:
            raise RuntimeError(
                f"ranks hold different projections, so their sketches cannot be added: give all "
                f"of them the same trainer.strategy.init_args, model and code (fingerprints "
                f"{', '.join(fingerprints)})"
            )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One optimizer step on the sums of all its microbatches; then they start again at zero."""
        self.sum_gradients(optimizer)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.sketches is not None
        assert self.sketches.step is not None
        self.sketches.begin_step(self.sketches.step + 1)
        return result

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """Add up over all ranks what they have accumulated; one process has all of it.

        Gradients of sharded weights are left alone: FSDP has reduced them.
        """
        if num_processes() == 1:
            return
        assert self.sketches is not None
        sum_over_processes_(self.sketches.flat)
        dense = [p for group in optimizer.param_groups[1:] for p in group["params"]]
        sum_dense_gradients_([p for p in dense if not is_sharded(p)], self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As the optimizer says, and without moving its counters to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Leave the module as it was."""
        if self._capture is not None:
            self._capture.remove()
        for module in (self._sketched or {}).values():
            module.weight.requires_grad_(True)
        self._sketched = None
        self._capture = None
        self.sketches = None
        super().teardown()

    @property
    def _is_fitting(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def check_trainer_options(trainer: Trainer) -> None:
    """Refuse Trainer options that mean nothing in manual optimization, naming ours instead."""
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} has no effect in manual "
            f"optimization: set model.max_grad_norm instead"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} is not used: one "
            f"batch is one step, cut into microbatches by model.max_tokens_per_microbatch"
        )
