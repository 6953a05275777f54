"""`EngineCheck`: refuses to train if engine and trainer give the same tokens other logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from logra_lightning.engines import Engine
from logra_lightning.seeding import derive_seed
from logra_lightning.types import Microbatch, PromptBatch, Rollouts, SamplingParams

# A correct engine differs by 0.04 on average for SmolLM2-135M in bf16.
_FLOAT32_TOLERANCE = 1e-4
_BFLOAT16_TOLERANCE = 0.1


class HasLogprobs(Protocol):
    """What `EngineCheck` needs a `LightningModule` to have."""

    policy: nn.Module
    sampling: SamplingParams

    def ready_engine(self) -> Engine:
        """The engine, started."""
        ...

    def pack(self, rollouts: Rollouts) -> Iterator[Microbatch]:
        """Put rollouts into microbatches."""
        ...

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """[T] fp32 logprobs in nats of the trained tokens; the second value is not used."""
        ...


class EngineCheck(Callback):
    """Compares the logprobs that engine and trainer give to a few sampled tokens.

    It checks before the first step, also after a resume, and again after the first sync that
    brought a change. What is wrong then would be wrong all along: weights that did not arrive or
    have other names, or another temperature. Batches must be `PromptBatch`es, and the module must
    have what `HasLogprobs` lists.

    Args:
        num_prompts: number of prompts of the batch that are completed for a check.
        max_tokens: largest number of tokens of each completion.
        tolerance: largest mean absolute difference of logprobs, in nats; when left out, 1e-4 if
            policy and engine are in fp32, else 0.1.
        every_n_steps: check also before every so many steps; 0 does not.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        num_prompts: int = 8,
        max_tokens: int = 16,
        tolerance: float | None = None,
        every_n_steps: int = 0,
    ) -> None:
        if num_prompts < 1 or max_tokens < 1 or every_n_steps < 0:
            raise ValueError(
                f"engine_check needs num_prompts and max_tokens of at least 1 and every_n_steps "
                f"not negative, got {num_prompts}, {max_tokens} and {every_n_steps}"
            )
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"engine_check.tolerance must be positive, got {tolerance}")
        self.num_prompts = num_prompts
        self.max_tokens = max_tokens
        self.tolerance = tolerance
        self.every_n_steps = every_n_steps
        self._before_first_step, self._before_first_sync = True, True
        self._moved = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in ("policy", "sampling", "ready_engine", "pack", "token_logprobs"):
            if not hasattr(pl_module, name):
                raise ValueError(
                    f"EngineCheck needs {type(pl_module).__name__} to have {name!r}: see "
                    f"HasLogprobs in logra_lightning.callbacks.engine_check, or leave it out"
                )
        self._before_first_step, self._before_first_sync = True, True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        regular = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        synced = self._before_first_sync and self._moved and not self._before_first_step
        if self._before_first_step or synced or regular:
            self._before_first_sync = self._before_first_sync and not synced
            self._before_first_step = False
            self.check(trainer, pl_module, batch)  # type: ignore[arg-type]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A step without signal changes no weight, so checking after it would prove nothing.
        self._moved = any(getattr(o, "last_step_scale", 1.0) > 0 for o in trainer.optimizers)

    def check(self, trainer: Trainer, module: HasLogprobs, batch: PromptBatch) -> float:
        """Return the mean absolute difference in nats; raise RuntimeError if it is too large."""
        engine = module.ready_engine()
        prompts = batch.prompt_ids[: self.num_prompts]
        sampling = replace(
            module.sampling, max_tokens=min(self.max_tokens, module.sampling.max_tokens)
        )
        seed = derive_seed("engine check", trainer.global_step)
        groups = engine.generate(prompts, sampling, num_completions=1, seed=seed)
        zeros = torch.zeros(len(prompts), dtype=torch.float32, device="cpu")
        completions = [completion for (completion,) in groups]
        rollouts = Rollouts(prompts, completions, zeros, {}, zeros)
        ours, theirs = [], []
        with torch.no_grad(), trainer.precision_plugin.train_step_context():
            for microbatch in module.pack(rollouts):
                ours.append(module.token_logprobs(microbatch)[0])
                theirs.append(microbatch.rollout_logprobs)
        if not sum(map(len, theirs)):
            raise RuntimeError(
                f"{type(engine).__name__} returned no finite logprob for any of "
                f"{int(rollouts.lengths.sum())} tokens, so nothing could be trained: let its "
                f"`generate` return the logprobs of the tokens that it draws"
            )
        trainer_logprobs, engine_logprobs = torch.cat(ours), torch.cat(theirs)
        difference = (trainer_logprobs - engine_logprobs).abs()
        found, bound = difference.mean().item(), self._bound(trainer, module, engine)
        what = (
            f"step {trainer.global_step}, {len(difference)} tokens at temperature "
            f"{sampling.temperature}: mean logprob {engine_logprobs.mean().item():.5f} in "
            f"{type(engine).__name__}, {trainer_logprobs.mean().item():.5f} in the trainer; mean "
            f"absolute difference {found:.2e}, largest {difference.max().item():.2e}"
        )
        if not found <= bound:
            raise RuntimeError(
                f"engine and trainer do not agree on the same tokens, {what}; at most {bound:.0e} "
                f"is allowed. If this much is right for this model, raise engine_check.tolerance"
            )
        rank_zero_info(f"EngineCheck: {what} (bound {bound:.0e}).")
        return found

    def _bound(self, trainer: Trainer, module: HasLogprobs, engine: Engine) -> float:
        if self.tolerance is not None:
            return self.tolerance
        dtypes = {module.policy.dtype, getattr(engine, "weight_dtype", torch.float32)}
        exact = dtypes == {torch.float32} and trainer.precision == "32-true"
        return _FLOAT32_TOLERANCE if exact else _BFLOAT16_TOLERANCE
