"""Strategies that own the sketches: which weights, which rank, when sums become a step.

`SketchMixin` goes in front of a Lightning strategy. It freezes the targets, so that no dense
gradient of theirs ever exists, hooks them when training is set up, and starts the next step's
sums after each optimizer step. It works with any `LightningModule` in manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from torch.optim import Optimizer

from logra_lightning.ranks import copy_from_rank_0_, of_all_ranks, sum_over_ranks_
from logra_lightning.sketch.bank import DEFAULT_TARGETS, SketchBank, find_targets
from logra_lightning.sketch.capture import SketchCapture
from logra_lightning.sketch.row_adam import RowAdam

_SUPPORTED_PRECISION = ("32-true", "bf16-mixed", "bf16-true")


class SketchMixin(Strategy):
    """What makes a strategy a sketching one.

    Attributes:
        targets: last parts of the names of the linear layers to sketch.
        rank: columns of every sketch.
        sketches: the bank during `fit`, else None.
    """

    targets: Sequence[str]
    rank: int
    projection_seed: int
    projection: Literal["rademacher", "gaussian"]
    sketches: SketchBank | None = None
    _capture: SketchCapture | None = None

    def _configure_sketches(
        self,
        rank: int,
        targets: Sequence[str],
        projection: Literal["rademacher", "gaussian"],
        projection_seed: int,
    ) -> None:
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

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Freeze and hook the targets, then let the module configure its optimizer."""
        modules = find_targets(self._module, self.targets)
        # A frozen copy, such as a reference model, is none of our business.
        modules = {name: m for name, m in modules.items() if m.weight.requires_grad}
        if not modules:
            raise ValueError(
                f"all weights called {', '.join(self.targets)} are frozen: leave "
                f"requires_grad=True on those to sketch"
            )
        self.sketches = SketchBank(
            modules,
            self.rank,
            seed=self.projection_seed,
            projection=self.projection,
            device=self.root_device,
        )
        for sketch in self.sketches:
            sketch.module.weight.requires_grad_(False)
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
        fingerprints = of_all_ranks(self.sketches.fingerprint())
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
        """Add up what the ranks have accumulated; one process has all of it."""

    def teardown(self) -> None:
        """Leave the module as it was."""
        if self._capture is not None:
            self._capture.remove()
        for sketch in self.sketches or ():
            sketch.module.weight.requires_grad_(True)
        self._capture = None
        self.sketches = None
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


class SketchStrategy(SketchMixin, SingleDeviceStrategy):
    """Gradient sketches on one device: `strategy: sketch`.

    Args:
        rank: columns of every sketch; at most the in_features of every target. Memory and time
            grow with it, noise falls with it.
        targets: last parts of the names of the linear layers to sketch. Embeddings and the output
            head cannot be.
        projection: `rademacher` (random signs) or `gaussian` (four times the memory).
        projection_seed: of the projections, the same on every rank.
        accelerator: given by the Trainer.
        checkpoint_io: given by the Trainer.
        precision_plugin: given by the Trainer.
    """

    strategy_name = "sketch"

    def __init__(
        self,
        rank: int = 256,
        targets: Sequence[str] = DEFAULT_TARGETS,
        projection: Literal["rademacher", "gaussian"] = "rademacher",
        projection_seed: int = 0,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._configure_sketches(rank, targets, projection, projection_seed)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device; the Trainer sets it from `accelerator` and `devices`."""
        return getattr(self, "_devices", [])

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy 'sketch' trains on one device, got {len(devices)}: set "
                f"trainer.devices=1 or trainer.strategy=sketch_ddp"
            )
        self._devices = devices
        self._root_device = torch.device(devices[0])


class SketchDDPStrategy(SketchMixin, DDPStrategy):
    """Gradient sketches on several devices, each with the whole model: `strategy: sketch_ddp`.

    The module is not wrapped in `DistributedDataParallel`. Sketches and the few dense gradients are
    added up once per step, so ranks may have different numbers of microbatches, and a module must
    divide its loss by what the whole step has, over all ranks.

    Args:
        rank: as in `SketchStrategy`.
        targets: as in `SketchStrategy`.
        projection: as in `SketchStrategy`.
        projection_seed: as in `SketchStrategy`; the same on every rank.
        process_group_backend: `nccl` on CUDA and `gloo` on CPUs when left out.
        timeout_s: seconds after which a rank gives up on the others.
        options: given by the Trainer.
    """

    strategy_name = "sketch_ddp"

    def __init__(
        self,
        rank: int = 256,
        targets: Sequence[str] = DEFAULT_TARGETS,
        projection: Literal["rademacher", "gaussian"] = "rademacher",
        projection_seed: int = 0,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )
        self._configure_sketches(rank, targets, projection, projection_seed)

    def configure_ddp(self) -> None:
        """Start from the weights and buffers of rank 0, as wrapping the module would."""
        module = self._module
        copy_from_rank_0_([p.data for p in module.parameters()] + list(module.buffers()))

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """Add up sketches and dense gradients over all ranks, in fp32."""
        assert self.sketches is not None
        sum_over_ranks_(self.sketches.flat)
        dense = [p for group in optimizer.param_groups[1:] for p in group["params"]]
        if not dense:
            return
        # A rank whose rollouts are all masked has no gradient where the others have one.
        parts = [
            torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float()
            for p in dense
        ]
        has_gradient = torch.tensor(
            [p.grad is not None for p in dense], dtype=torch.float32, device=self.root_device
        )
        flat = torch.cat([has_gradient, *(part.reshape(-1) for part in parts)])
        sum_over_ranks_(flat)
        anywhere, *sums = flat.split([len(dense), *(p.numel() for p in dense)])
        for param, total, count in zip(dense, sums, anywhere.tolist(), strict=True):
            param.grad = total.view_as(param).to(param.dtype) if count else None


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


for _strategy, _description in (
    (SketchStrategy, "gradient sketches, one device"),
    (SketchDDPStrategy, "gradient sketches, the whole model on each of several devices"),
):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(_strategy.strategy_name, _strategy, description=_description)
