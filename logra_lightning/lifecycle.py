"""`PolicyLifecycle`: policy, tokenizer, engine and optimizer, from set-up to the end of a run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from logra_lightning.engines import Engine, TorchEngine, VLLMEngine
from logra_lightning.optim import AdamWOptions, RowAdam
from logra_lightning.optim.adamw import clip_gradients_, dense_adamw
from logra_lightning.optim.state import NamedParameters
from logra_lightning.policy.head import check_head
from logra_lightning.policy.load import (
    checkpoint_activations_,
    exact_buffers,
    freeze_,
    load_policy,
    policy_source,
    stop_token_ids,
)
from logra_lightning.seeding import derive_seed
from logra_lightning.sketch import DEFAULT_TARGETS, SketchBank
from logra_lightning.strategy import SketchMixin, check_trainer_options
from logra_lightning.tokenizer import load_tokenizer

OptimizerFactory = Callable[[NamedParameters, SketchBank, AdamWOptions, float | None], RowAdam]


class PolicyLifecycle(LightningModule):
    """What a module with a policy and an engine does around its steps; `PolicyModule` adds those.

    Args:
        model: folder or hub name of a `transformers` causal language model with its tokenizer.
        engine: what samples; the default one when None.
        optimizer: rule for the sketched weights.
        adamw: options for what AdamW trains.
        lr_scheduler: made from the optimizer, advanced once per step.
        train_others: also train what is not sketched.
        max_grad_norm: clip the norm of the gradient; None does not.
        activation_checkpointing: keep less during the forward pass and compute it again.
        model_kwargs: passed to `from_pretrained`.
        seed: of what is sampled.
    """

    def __init__(
        self,
        model: str,
        *,
        engine: Engine | None,
        optimizer: OptimizerFactory,
        adamw: AdamWOptions,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None,
        train_others: bool,
        max_grad_norm: float | None,
        activation_checkpointing: bool,
        model_kwargs: dict[str, Any] | None,
        seed: int,
    ) -> None:
        super().__init__()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"model.max_grad_norm must be positive or null, got {max_grad_norm}")
        self.automatic_optimization = False
        self.model_path = model
        self.engine: Engine = engine or _default_engine()
        self.optimizer = optimizer
        self.adamw = adamw
        self.lr_scheduler = lr_scheduler
        self.train_others = train_others
        self.max_grad_norm = max_grad_norm
        self.activation_checkpointing = activation_checkpointing
        self.model_kwargs = model_kwargs or {}
        self.seed = seed
        self.policy: nn.Module | None = None
        self.tokenizer: Any = None
        self._engine_started = False
        self._phase_s: dict[str, float] = {}

    # Policy.

    def configure_callbacks(self) -> list[Any]:
        # The first hook of all: before Lightning's own check, whose message names no way out.
        check_trainer_options(self.trainer)
        return [_CloseEngine()]

    def configure_model(self) -> None:
        """Load the policy, once; the precision decides the dtype of its weights."""
        if self.policy is None:
            self.tokenizer = load_tokenizer(self.model_path)
            self.policy = load_policy(self.model_path, **self.model_kwargs)
            if self.activation_checkpointing:
                checkpoint_activations_(self.policy)
        targets = getattr(self.trainer.strategy, "targets", DEFAULT_TARGETS)
        freeze_(self.policy, targets, train_others=self.train_others)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Every cast and move of the module, which under bf16-true would round buffers too."""
        with exact_buffers(self):
            return super()._apply(*args, **kwargs)

    def on_fit_start(self) -> None:
        assert self.policy is not None
        tolerance = 1e-4 if self.policy.dtype == torch.float32 else 2e-2
        check_head(self.policy, tolerance=tolerance)

    def on_train_start(self) -> None:
        """Let the command line win over the hyper-parameters in a checkpoint, and say so."""
        for optimizer in self.trainer.optimizers:
            for name, (then, now) in getattr(optimizer, "overruled", {}).items():
                rank_zero_info(f"{name} is {now} now; the checkpoint had {then}.")
        for config in self.trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                groups = config.scheduler.optimizer.param_groups
                config.scheduler.base_lrs = [group["initial_lr"] for group in groups]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the policy was made from, for exports, and let a broken batch be made again."""
        checkpoint["policy_source"] = policy_source(self.model_path, self.policy)
        # The loader has given out a batch that was interrupted.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready > progress.processed:
            for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
                if "position" in state:  # of a PromptLoader
                    state["position"] -= 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a sketching run for a dense one; RowAdam refuses the reverse."""
        states = checkpoint.get("optimizer_states", [])
        is_sketching = isinstance(self.trainer.strategy, SketchMixin)
        if self._is_fitting and states and "sketch" in states[0] and not is_sketching:
            raise ValueError(
                f"the checkpoint is of a run with sketches, but "
                f"{type(self.trainer.strategy).__name__} has none: resume with trainer.strategy as "
                f"it was"
            )

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def _shards_weights(self) -> bool:
        return getattr(self.trainer.strategy, "shards_weights", False)

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)

    # Optimizer.

    def configure_optimizers(self) -> Any:
        sketches = getattr(self.trainer.strategy, "sketches", None)
        optimizer: Optimizer
        if sketches is not None:
            optimizer = self.optimizer(
                self.named_parameters(), sketches, self.adamw, self.max_grad_norm
            )
        else:
            strategy = type(self.trainer.strategy).__name__
            optimizer = dense_adamw(self._trained(), self.adamw, strategy)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def _trained(self) -> list[Parameter]:
        return [param for param in self.parameters() if param.requires_grad]

    def take_step(self) -> None:
        """One optimizer step on everything that was accumulated."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        if not isinstance(optimizer.optimizer, RowAdam):
            norm = clip_gradients_(self._trained(), self.max_grad_norm)
            self.log("optim/grad_norm", norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            assert not isinstance(scheduler, list)
            scheduler.step()

    # Engine.

    def ready_engine(self) -> Engine:
        """The engine, started with the policy as it stands when it is first asked for."""
        if not self._engine_started:
            assert self.policy is not None
            self.engine.start(self.policy, stop_token_ids(self.policy, self.tokenizer))
            self._engine_started = True
        return self.engine

    def current_engine(self) -> Engine:
        """The engine, with the weights of now.

        Raises:
            RuntimeError: it samples from an older policy than the one being trained.
        """
        engine = self.ready_engine()
        if self._is_fitting and engine.policy_version not in (None, self.global_step):
            raise RuntimeError(
                f"{type(engine).__name__} samples from policy version {engine.policy_version}, but "
                f"{self.global_step} steps have been made: add the WeightSync callback "
                f"(logra_lightning.callbacks); on the command line, weight_sync.enabled=true"
            )
        return engine

    def teardown(self, stage: str) -> None:
        self.engine.close()
        self._engine_started = False

    # What every step needs.

    def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        """Texts without special tokens."""
        return self.tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    def _seed(self, purpose: str, number: int) -> int:
        return derive_seed(self.seed, number, self.global_rank, purpose)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase of the batch, the work on the device included."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._phase_s[name] = self._phase_s.get(name, 0.0) + time.perf_counter() - start


class _CloseEngine(Callback):
    """Lightning tears a module down only where all went well."""

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        assert isinstance(pl_module, PolicyLifecycle)
        pl_module.teardown("fit")


def _default_engine() -> Engine:
    if importlib.util.find_spec("vllm") is not None:
        return VLLMEngine()
    rank_zero_info("vLLM is not installed: TorchEngine samples the completions.")
    return TorchEngine()
