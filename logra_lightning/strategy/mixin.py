"""`SketchMixin`: what makes a Lightning strategy own the sketches.

It stands before the strategy in the list of base classes. When training is set up, it freezes the
layers to sketch, so that they never have a dense gradient, and hooks them, so that each backward
pass adds to their sketches. After each optimizer step it sets the sketches to zero. It works with
any `LightningModule` in manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO
from logra_lightning.distributed.gradients import sum_dense_gradients_
from logra_lightning.distributed.processes import (
    leave_group_at_exit,
    num_processes,
    of_all_processes,
    sum_over_processes_,
)
from logra_lightning.distributed.sharding import is_sharded
from logra_lightning.optim.row_adam import RowAdam
from logra_lightning.sketch.bank import SketchBank
from logra_lightning.sketch.capture import SketchCapture
from logra_lightning.sketch.targets import find_targets
from logra_lightning.strategy.agreement import EVERY_STEPS, check_same_update
from logra_lightning.strategy.parent_watch import exit_with_parent

SUPPORTED_PRECISION = ("32-true", "bf16-mixed", "bf16-true")


class SketchMixin(Strategy):
    """Makes a Lightning strategy train with sketches.

    Args:
        rank: number of columns of every sketch; at most the `in_features` of each layer that is
            sketched. With a higher rank, sketches take more memory and time and have less noise.
        targets: names of the linear layers to sketch, by their last part: `q_proj` means
            `model.layers.0.self_attn.q_proj` and all others that end so. When left out, all linear
            layers of the decoder layers but for routers. Embeddings and the output head cannot be
            sketched.
        projection: kind of random numbers that gradients are projected with: `rademacher` (signs),
            or `gaussian`, which takes four times the memory.
        projection_seed: seed of the projections; must be the same in every process.
        frozen_experts: train a mixture of experts although its routed experts stay as they are;
            they cannot be sketched. Such a model is refused otherwise.
        options: options of the strategy that follows in the list of base classes. The Trainer
            passes most of them.

    Attributes:
        sketches: the sketches during `fit`, None before and after it.
        shards_weights: whether each process holds only some rows of each weight, so that processes
            have to run their forward passes together.
    """

    sketches: SketchBank | None = None
    shards_weights = False
    _capture: SketchCapture | None = None
    _sketched: dict[str, nn.Linear] | None = None
    _has_compared = False

    def __init__(
        self,
        rank: int = 256,
        targets: Sequence[str] | None = None,
        projection: Literal["rademacher", "gaussian"] = "rademacher",
        projection_seed: int = 0,
        frozen_experts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        if rank < 1:
            raise ValueError(f"sketch rank must be at least 1, got {rank}")
        self.rank = rank
        self.targets = None if targets is None else list(targets)
        self.projection = projection
        self.projection_seed = projection_seed
        self.frozen_experts = frozen_experts

    def connect(self, model: LightningModule) -> None:
        """Refuse options that cannot work, before anything has been set up."""
        super().connect(model)
        trainer = model.trainer
        if model.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__} needs manual optimization: set "
                f"self.automatic_optimization = False in {type(model).__name__}, call "
                f"self.manual_backward for each microbatch and self.optimizers().step() once"
            )
        check_trainer_options(trainer)
        if self.precision_plugin.precision not in SUPPORTED_PRECISION:
            raise ValueError(
                f"sketches support trainer.precision {', '.join(SUPPORTED_PRECISION)}, got "
                f"{self.precision_plugin.precision}"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        if torch.distributed.is_initialized() and self.root_device.type == "cuda":
            leave_group_at_exit()
        environment = getattr(self, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            exit_with_parent()  # process 0 started this one, so no launcher watches both

    def freeze_targets(self) -> dict[str, nn.Linear]:
        """Turn off the dense gradients of the layers to sketch, and return these by name.

        A second call returns the same layers.
        """
        if self._sketched is None:
            modules = find_targets(self._module, self.targets)
            # Copies that the module has frozen, such as a reference model, are not trained.
            modules = {name: m for name, m in modules.items() if m.weight.requires_grad}
            if not modules:
                raise ValueError(
                    f"all weights called {', '.join(self.targets or ['as by default'])} are "
                    f"frozen: leave requires_grad=True on those to sketch"
                )
            for module in modules.values():
                module.weight.requires_grad_(False)
            self._sketched = modules
        return self._sketched

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Freeze and hook the layers to sketch, then let the module configure its optimizer."""
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
                f"processes hold different projections, so their sketches cannot be added: give "
                f"all of them the same trainer.strategy.init_args, model and code (fingerprints "
                f"{', '.join(fingerprints)})"
            )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step with what all processes have summed, then set the sketches to zero.

        Raises:
            RuntimeError: processes hold different weights or made different updates, which is
                looked at in the first step of a run and in each 100th.
        """
        self.sum_gradients(optimizer)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.sketches is not None
        step = self.sketches.step
        assert step is not None
        if step % EVERY_STEPS == 0 or not self._has_compared:
            # By the step, which is the same in all processes whatever else differs.
            check_same_update(self._module, getattr(optimizer, "factors", None), step)
            self._has_compared = True
        self.sketches.begin_step(step + 1)
        return result

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """Sum sketches and dense gradients over all processes.

        Gradients of sharded weights are left alone: FSDP has already summed them.
        """
        if num_processes() == 1:
            return
        assert self.sketches is not None
        sum_over_processes_(self.sketches.flat)
        dense = [p for group in optimizer.param_groups[1:] for p in group["params"]]
        sum_dense_gradients_([p for p in dense if not is_sharded(p)], self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state as the optimizer does; Lightning would move its counters to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Leave the module as it was before training: no hooks, and gradients turned on again."""
        if self._capture is not None:
            self._capture.remove()
        for module in (self._sketched or {}).values():
            module.weight.requires_grad_(True)
        self._sketched = None
        self._capture = None
        self._has_compared = False
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
    """Refuse Trainer options that have no effect in manual optimization; name ours instead."""
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} has no effect in manual "
            f"optimization: set model.max_grad_norm instead"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} is not used: one "
            f"batch is one step, cut into microbatches by model.memory.max_tokens_per_microbatch"
        )
