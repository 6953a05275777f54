"""`PolicyModule`: a language model, its rewards, and the whole algorithm in `training_step`.

The strategy decides how the step is made: with a sketching one the attention and MLP matrices
are updated by their sketches, with any other they are trained densely by AdamW.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from logra_lightning.objective import (
    GRPO,
    Advantage,
    ClippedPolicyGradient,
    Loss,
    check_head,
    head_of,
    token_logprobs,
)
from logra_lightning.objective.logprobs import final_hidden
from logra_lightning.policy import (
    check_lengths,
    checkpoint_activations_,
    context_length,
    exact_buffers,
    freeze_,
    load_policy,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
)
from logra_lightning.probe import rollout_probe
from logra_lightning.rewards import Reward, check_columns
from logra_lightning.rollout import (
    Engine,
    TorchEngine,
    VLLMEngine,
    collect,
    evaluate,
    pack,
    rollout_stats,
)
from logra_lightning.seeding import derive_seed
from logra_lightning.sketch import (
    DEFAULT_TARGETS,
    AdamWOptions,
    KLProbe,
    RelativeRowAdam,
    RowAdam,
    SketchBank,
)
from logra_lightning.strategy import SketchMixin, check_trainer_options
from logra_lightning.types import Microbatch, PromptBatch, Rollouts, SamplingParams

OptimizerFactory = Callable[[Iterable[Parameter], SketchBank, AdamWOptions, float | None], RowAdam]


class PolicyModule(LightningModule):
    """Trains a causal language model by reinforcement learning on its own completions.

    Args:
        model: folder or hub name of a `transformers` causal language model with its tokenizer.
        rewards: terms of the reward.
        group_size: completions per prompt.
        sampling: how training completions are drawn.
        eval_sampling: how validation completions are drawn; greedy, as long as `sampling`, when
            left out.
        success_reward: a validation completion with at least this reward counts as a success.
        advantage: rewards of a group to advantages.
        loss: policy-gradient loss.
        engine: what samples; `VLLMEngine` when left out and vLLM is installed, else `TorchEngine`.
        optimizer: rule for the sketched weights: `RelativeRowAdam` (the paper's) or `RowAdam`.
        adamw: options for what AdamW trains: all trained weights without sketches, those of
            `train_others` with them.
        lr_scheduler: made from the optimizer, advanced once per step.
        train_others: also train embeddings, norms, biases and head. They are frozen otherwise.
        max_grad_norm: clip the norm of the gradient; null does not.
        max_tokens_per_microbatch: padded tokens of one forward and backward pass. Changes memory
            and speed, not the result.
        logprob_chunk_tokens: tokens whose logits exist at the same time.
        activation_checkpointing: keep less during the forward pass and compute it again.
        model_kwargs: passed to `from_pretrained`, for instance `{attn_implementation: eager}`.
        seed: of the completions.

    Raises:
        ValueError: options that cannot work together, here or when training is set up.
    """

    def __init__(
        self,
        model: str,
        rewards: list[Reward],
        group_size: int = 8,
        sampling: SamplingParams = SamplingParams(),
        eval_sampling: SamplingParams | None = None,
        success_reward: float = 1.0,
        advantage: Advantage | None = None,
        loss: Loss | None = None,
        engine: Engine | None = None,
        optimizer: OptimizerFactory = RelativeRowAdam,
        adamw: AdamWOptions = AdamWOptions(),
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        train_others: bool = False,
        max_grad_norm: float | None = 1.0,
        max_tokens_per_microbatch: int = 16_384,
        logprob_chunk_tokens: int = 512,
        activation_checkpointing: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_path = model
        self.rewards = rewards
        self.group_size = group_size
        self.sampling = sampling
        self.eval_sampling = eval_sampling or SamplingParams(sampling.max_tokens, temperature=0.0)
        self.success_reward = success_reward
        self.advantage = advantage or GRPO()
        self.loss = loss or ClippedPolicyGradient()
        self.engine: Engine = engine or _default_engine()
        self.optimizer = optimizer
        self.adamw = adamw
        self.lr_scheduler = lr_scheduler
        self.train_others = train_others
        self.max_grad_norm = max_grad_norm
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.activation_checkpointing = activation_checkpointing
        self.model_kwargs = model_kwargs or {}
        self.seed = seed
        self.policy: nn.Module | None = None
        self.tokenizer: Any = None
        self._engine_started = False
        self._rollouts: Rollouts | None = None
        self._mismatch: Tensor | float = 0.0
        self._phase_s: dict[str, float] = {}
        self._check_options()

    def _check_options(self) -> None:
        if not self.rewards:
            raise ValueError("model.rewards is empty: name at least one reward")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two rewards have the same name among {labels}: set their names")
        if self.sampling.temperature == 0:
            raise ValueError(
                "model.sampling.temperature is 0: training needs completions that differ, so it "
                "must be positive (1.0 is usual); model.eval_sampling may be greedy"
            )
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                f"model.sampling has top_p={self.sampling.top_p} and top_k={self.sampling.top_k}: "
                f"completions would come from another distribution than the one that is trained, "
                f"so leave them at 1 and 0; model.eval_sampling may use them"
            )
        if self.group_size < self.advantage.min_group_size:
            raise ValueError(
                f"model.group_size is {self.group_size}, but {type(self.advantage).__name__} "
                f"compares completions of the same prompt: set it to at least "
                f"{self.advantage.min_group_size}"
            )
        if min(self.max_tokens_per_microbatch, self.logprob_chunk_tokens) < 1:
            raise ValueError(
                "model.max_tokens_per_microbatch and logprob_chunk_tokens must be at least 1"
            )

    # One batch, from prompts to an optimizer step.

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        with self._phase("rollout"):
            rollouts = self.collect(prompts)
            self.engine.sleep()
        totals: dict[str, Tensor] = {}
        self._rollouts, self._mismatch = rollouts, 0.0
        with self._phase("train"):
            for microbatch in self.pack(rollouts):
                logprobs, entropy = self.token_logprobs(microbatch)
                loss, stats = self.loss(logprobs, microbatch, rollouts.num_completion_tokens)
                self.manual_backward(loss)  # capture hooks add to the sketches
                self._mismatch += (microbatch.rollout_logprobs - logprobs.detach()).sum()
                stats["policy/entropy"] = entropy.sum() / rollouts.num_completion_tokens
                _add_(totals, stats)
        with self._phase("update"):
            self.update()
        self._log_step(rollouts, totals)

    def collect(self, prompts: PromptBatch) -> Rollouts:
        """Completions of `prompts`, scored: engine, rewards, advantages; no gradient.

        Raises:
            RuntimeError: the engine samples from an older policy than the one being trained.
        """
        return collect(
            prompts,
            engine=self._current_engine(),
            decode=self._decode,
            rewards=self.rewards,
            advantage=self.advantage,
            sampling=self.sampling,
            group_size=self.group_size,
            seed=self._seed("rollout", self.global_step),
        )

    def pack(self, rollouts: Rollouts) -> Iterator[Microbatch]:
        """Microbatches of at most `max_tokens_per_microbatch` padded tokens."""
        return pack(
            rollouts,
            self.max_tokens_per_microbatch,
            pad_token_id=pad_token_id(self.tokenizer),
            temperature=self.sampling.temperature,
            device=self.device,
        )

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """[T] fp32 logprobs of the trained tokens under the policy, and [T] fp32 entropies."""
        assert self.policy is not None
        hidden = final_hidden(self.policy, microbatch.input_ids)
        predicts = microbatch.completion_mask[:, 1:]  # position t predicts token t + 1
        return token_logprobs(
            hidden[:, :-1][predicts],
            microbatch.target_ids,
            head_of(self.policy),
            temperature=microbatch.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """A few of the batch's rollouts, for `KLBudget` to take the KL of the step on.

        Args:
            num_rollouts: spread evenly over the batch.
            max_tokens: of prompt and completion; what is longer is cut off, but for one token.
        """
        assert self.policy is not None
        assert self._rollouts is not None
        tokens = self._rollouts.num_completion_tokens
        return rollout_probe(
            self.policy,
            self._rollouts.spread(num_rollouts).cut(max_tokens),
            temperature=self.sampling.temperature,
            pad_token_id=pad_token_id(self.tokenizer),
            device=self.device,
            mismatch=float(self._mismatch) / tokens,
        )

    def update(self) -> None:
        """One optimizer step on everything that was accumulated."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        if not isinstance(optimizer.optimizer, RowAdam):
            params = [p for p in self.parameters() if p.requires_grad]
            limit = self.max_grad_norm or float("inf")
            norm = nn.utils.clip_grad_norm_(params, limit, error_if_nonfinite=True)
            self.log("optim/grad_norm", norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            assert not isinstance(scheduler, list)
            scheduler.step()

    def _log_step(self, rollouts: Rollouts, totals: dict[str, Tensor]) -> None:
        stats = rollout_stats(rollouts, self.group_size)
        for name in ("rollout/reward", "rollout/length"):
            self.log(name, stats.pop(name), prog_bar=True, batch_size=len(rollouts))
        times = {f"time/{name}_s": seconds for name, seconds in self._phase_s.items()}
        times["time/step_s"] = sum(self._phase_s.values())
        # Lightning would count batches from 0, and differently after a resume.
        step = {"step": float(self.global_step)}
        self.log_dict({**stats, **times, **totals, **step}, batch_size=len(rollouts))

    # Validation, test and prediction: never a gradient, never the training seeds.

    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        self._evaluate(prompts, batch_idx, "eval")

    def test_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        self._evaluate(prompts, batch_idx, "test")

    def _evaluate(self, prompts: PromptBatch, batch_idx: int, prefix: str) -> None:
        rows = self.predict_step(prompts, batch_idx)
        rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float32)
        lengths = torch.tensor([row["length"] for row in rows], dtype=torch.float32)
        truncated = torch.tensor([row["truncated"] for row in rows], dtype=torch.float32)
        values = {
            "pass@1": (rewards >= self.success_reward).to(torch.float32).mean(),
            "reward": rewards.mean(),
            "length": lengths.mean(),
            "truncated_frac": truncated.mean(),
        }
        for name, value in values.items():
            self.log(
                f"{prefix}/{name}",
                value,
                prog_bar=name == "pass@1",
                batch_size=len(rows),
                sync_dist=True,
            )

        self.log("step", float(self.global_step), batch_size=len(rows), sync_dist=True)

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """One completion per prompt with its reward, as plain values."""
        return evaluate(
            prompts,
            engine=self._current_engine(),
            decode=self._decode,
            rewards=self.rewards,
            sampling=self.eval_sampling,
            seed=self._seed("eval", batch_idx),
        )

    # Set-up.

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.trainer.world_size > 1:
            raise ValueError(
                f"PolicyModule trains in one process for now, got {self.trainer.world_size}: set "
                f"trainer.devices=1 and trainer.num_nodes=1"
            )
        columns = getattr(self._datamodule, "columns", None)
        if columns is not None:
            check_columns(self.rewards, columns)

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
        longest_prompt = getattr(self._datamodule, "longest_prompt", None)
        if longest_prompt is not None:
            check_lengths(
                longest_prompt,
                self.sampling.max_tokens,
                self.eval_sampling.max_tokens,
                min(context_length(self.policy), self.engine.max_model_len or sys.maxsize),
                self.max_tokens_per_microbatch,
            )
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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a sketching run for a dense one; RowAdam refuses the reverse."""
        states = checkpoint.get("optimizer_states", [])
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and states and "sketch" in states[0] and not self._is_sketching:
            raise ValueError(
                f"the checkpoint is of a run with sketches, but "
                f"{type(self.trainer.strategy).__name__} has none: resume with trainer.strategy as "
                f"it was"
            )

    @property
    def _is_sketching(self) -> bool:
        return isinstance(self.trainer.strategy, SketchMixin)

    def configure_optimizers(self) -> Any:
        sketches = getattr(self.trainer.strategy, "sketches", None)
        optimizer: Optimizer
        if sketches is not None:
            optimizer = self.optimizer(self.parameters(), sketches, self.adamw, self.max_grad_norm)
        else:
            optimizer = self._dense_optimizer()
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def _dense_optimizer(self) -> Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        rank_zero_info(
            f"{type(self.trainer.strategy).__name__} has no sketches: AdamW trains "
            f"{sum(p.numel() for p in params):,} weights densely."
        )
        if any(p.dtype != torch.float32 for p in params):
            rank_zero_warn(
                "AdamW updates bf16 weights here, where small updates vanish in rounding: use "
                "trainer.precision=bf16-mixed, or a sketching strategy, which keeps exact masters"
            )
        return AdamW(
            params,
            lr=self.adamw.lr,
            betas=self.adamw.betas,
            eps=self.adamw.eps,
            weight_decay=self.adamw.weight_decay,
        )

    def teardown(self, stage: str) -> None:
        self.engine.close()
        self._engine_started = False

    def ready_engine(self) -> Engine:
        """The engine, started with the policy as it stands when it is first asked for."""
        if not self._engine_started:
            assert self.policy is not None
            self.engine.start(self.policy, stop_token_ids(self.policy, self.tokenizer))
            self._engine_started = True
        return self.engine

    def _current_engine(self) -> Engine:
        """The engine, with the weights of now."""
        engine = self.ready_engine()
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and engine.policy_version not in (None, self.global_step):
            raise RuntimeError(
                f"{type(engine).__name__} samples from policy version {engine.policy_version}, but "
                f"{self.global_step} steps have been made: add the WeightSync callback "
                f"(logra_lightning.callbacks); on the command line, weight_sync.enabled=true"
            )
        return engine

    def _decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    def _seed(self, purpose: str, number: int) -> int:
        return derive_seed(self.seed, number, self.global_rank, purpose)

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, the work on the device included."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._phase_s[name] = time.perf_counter() - start


class _CloseEngine(Callback):
    """Lightning tears a module down only where all went well."""

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        pl_module.teardown("fit")


def _default_engine() -> Engine:
    if importlib.util.find_spec("vllm") is not None:
        return VLLMEngine()
    rank_zero_info("vLLM is not installed: TorchEngine samples the completions.")
    return TorchEngine()


def _add_(totals: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
    for name, value in stats.items():
        totals[name] = totals[name] + value if name in totals else value
