"""`PolicyModule`: a language model, its rewards, and the whole algorithm in `training_step`.

The strategy decides how the step is made: with a sketching one the attention and MLP matrices
are updated by their sketches, with any other they are trained densely by AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from logra_lightning import checks
from logra_lightning.distributed.processes import counts_over_processes, of_all_processes
from logra_lightning.distributed.sharding import gathered_through_backward
from logra_lightning.engines import Engine
from logra_lightning.kl import KLProbe
from logra_lightning.lifecycle import OptimizerFactory, PolicyLifecycle
from logra_lightning.objective import (
    GRPO,
    Advantage,
    BatchStats,
    Correction,
    Loss,
    Normalizer,
    Objective,
    PPOClip,
    ReferenceKL,
    TokenMean,
    TokenTruncation,
    token_logprobs,
)
from logra_lightning.optim import AdamWOptions, RelativeRowAdam
from logra_lightning.policy.head import final_hidden, head_of
from logra_lightning.policy.load import context_length
from logra_lightning.policy.reference import Reference
from logra_lightning.rewards import Reward, check_columns, unusable_rows
from logra_lightning.rollout import (
    DynamicSampling,
    Sampler,
    collect,
    evaluate,
    minibatches,
    pack,
    same_number_per_process,
)
from logra_lightning.rollout.evaluation import EvalMetrics
from logra_lightning.rollout.probe import rollout_probe
from logra_lightning.rollout.stats import merged_metrics
from logra_lightning.strategy import SketchMixin
from logra_lightning.tokenizer import pad_token_id
from logra_lightning.types import Microbatch, PromptBatch, Rollouts, SamplingParams

_MUCH_TRUNCATED = 0.25  # of the first batch's completions


class PolicyModule(PolicyLifecycle):
    """Trains a causal language model by reinforcement learning on its own completions.

    Args:
        model: folder or hub name of a `transformers` causal language model with its tokenizer.
        rewards: terms of the reward.
        group_size: completions per prompt.
        sampling: how training completions are drawn.
        eval_sampling: how validation completions are drawn; greedy, as long as `sampling`, when
            left out.
        eval_completions: n, completions per prompt in validation.
        eval_pass_k: each k of pass@k, at most n; 1 and n when left out.
        success_reward: a validation completion with at least this reward counts as a success.
        advantage: rewards of a batch to advantages; `GRPO` when left out.
        loss: of a token; `PPOClip` when left out.
        normalizer: how much a token counts in the step's loss; `TokenMean` when left out.
        correction: of tokens that the engine sampled with other probabilities than the policy;
            `TokenTruncation` at 2 when left out, `NoCorrection` for none.
        reference_kl: adds a KL to the policy of the start; null adds none.
        entropy_coefficient: of the entropy that the loss rewards.
        mask_truncated: completions that were cut off do not train; their rewards still count in
            the advantages of their group.
        dynamic_sampling: replaces prompts whose completions all got the same reward; null keeps
            them.
        inner_epochs: times that a batch of rollouts is trained on.
        minibatches: optimizer steps of each of them. Prompts per step are those of a batch.
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
        eval_completions: int = 1,
        eval_pass_k: list[int] | None = None,
        success_reward: float = 1.0,
        advantage: Advantage | None = None,
        loss: Loss | None = None,
        normalizer: Normalizer | None = None,
        correction: Correction | None = None,
        reference_kl: ReferenceKL | None = None,
        entropy_coefficient: float = 0.0,
        mask_truncated: bool = False,
        dynamic_sampling: DynamicSampling | None = None,
        inner_epochs: int = 1,
        minibatches: int = 1,
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
        super().__init__(
            model,
            engine=engine,
            optimizer=optimizer,
            adamw=adamw,
            lr_scheduler=lr_scheduler,
            train_others=train_others,
            max_grad_norm=max_grad_norm,
            activation_checkpointing=activation_checkpointing,
            model_kwargs=model_kwargs,
            seed=seed,
        )
        self.rewards = rewards
        self.group_size = group_size
        self.sampling = sampling
        self.eval_sampling = eval_sampling or SamplingParams(sampling.max_tokens, temperature=0.0)
        self.eval_completions = eval_completions
        self.success_reward = success_reward
        self.advantage = advantage or GRPO()
        self.objective = Objective(
            loss or PPOClip(), correction or TokenTruncation(), reference_kl, entropy_coefficient
        )
        self.normalizer = normalizer or TokenMean()
        self.mask_truncated = mask_truncated
        self.dynamic_sampling = dynamic_sampling
        self.inner_epochs = inner_epochs
        self.num_minibatches = minibatches
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.logprob_chunk_tokens = logprob_chunk_tokens
        checks.check_rewards(rewards)
        checks.check_sampling(sampling)
        checks.check_at_least_one(
            group_size=group_size,
            eval_completions=eval_completions,
            inner_epochs=inner_epochs,
            minibatches=minibatches,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            logprob_chunk_tokens=logprob_chunk_tokens,
        )
        checks.check_groups(group_size, self.advantage, drops_groups=dynamic_sampling is not None)
        pass_k = eval_pass_k or [1, eval_completions]
        checks.check_evaluation(eval_completions, pass_k, self.eval_sampling)
        checks.check_numbers(entropy_coefficient=entropy_coefficient, success_reward=success_reward)
        self.rollouts: Rollouts | None = None
        self.eval_rows: list[dict[str, Any]] = []
        self._eval_metrics = EvalMetrics(pass_k)
        self._reference: Reference | None = None
        self._minibatch: Rollouts | None = None
        self._stats = BatchStats()
        self._told_truncated = False
        self._advantage_before: dict[str, Any] | None = None

    # One batch, from prompts to optimizer steps.

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        self._phase_s, self._stats = {}, BatchStats()
        self._advantage_before = self._advantage_state()
        with self._phase("rollout"):
            self.rollouts = self.collect(prompts)
            self.engine.sleep()
        for minibatch in self.minibatches(self.rollouts):
            self._stats.begin_step()
            has_signal = any(of_all_processes(bool((minibatch.advantages != 0).any())))
            with self._phase("train"):
                for microbatch in self.pack(minibatch):
                    logprobs, entropies = self.token_logprobs(microbatch)
                    if not microbatch.rollouts:  # the other ranks have one more
                        loss = logprobs.sum()
                    else:
                        loss = self.objective(logprobs, entropies, microbatch, self._stats)
                    if has_signal:
                        self.manual_backward(loss)  # capture hooks add to the sketches
            with self._phase("update"):
                self.take_step()
        self._advantage_before = None
        self._log_batch(self.rollouts)

    def collect(self, prompts: PromptBatch) -> Rollouts:
        """Completions of `prompts`, scored: engine, rewards, advantages; no gradient.

        Raises:
            RuntimeError: the engine samples from an older policy than the one being trained.
        """
        return collect(
            prompts,
            sampler=self._sampler(self.sampling, self.group_size),
            advantage=self.advantage,
            seed=self._seed("rollout", self.global_step),
            dynamic_sampling=self.dynamic_sampling,
            refill=getattr(self._datamodule, "refill", None),
        )

    def _sampler(self, sampling: SamplingParams, num_completions: int) -> Sampler:
        return Sampler(self.current_engine(), self.decode, self.rewards, sampling, num_completions)

    def minibatches(self, rollouts: Rollouts) -> Iterator[Rollouts]:
        """What each optimizer step of a batch trains on; always as many steps."""
        with self._phase("logprobs"):
            if self._reference is not None:
                with self._reference.weights():
                    rollouts = replace(rollouts, reference_logprobs=self._logprobs(rollouts))
            if self.inner_epochs * self.num_minibatches > 1:
                rollouts = replace(rollouts, old_logprobs=self._logprobs(rollouts))
        for _ in range(self.inner_epochs):
            seed = self._seed("minibatches", self.global_step)
            for part in minibatches(rollouts, self.group_size, self.num_minibatches, seed=seed):
                if self.mask_truncated:
                    part = part.select((~part.truncated).nonzero()[:, 0].tolist())
                tokens, size = counts_over_processes(part.num_completion_tokens, len(part))
                self._minibatch = replace(part, step_tokens=tokens, step_rollouts=size)
                yield self._minibatch

    @torch.no_grad()
    def _logprobs(self, rollouts: Rollouts) -> list[Tensor]:
        """B tensors of [n] fp32 logprobs of each completion, under the weights as they are."""
        logprobs: list[Tensor] = [torch.empty(0)] * len(rollouts)
        for microbatch in self.pack(rollouts):
            found = self.token_logprobs(microbatch)[0]
            if not microbatch.rollouts:  # made for the other ranks' sake
                continue
            parts = found.split(microbatch.lengths.tolist())
            for i, part in zip(microbatch.rollouts, parts, strict=True):
                logprobs[i] = part
        return logprobs

    def pack(self, rollouts: Rollouts) -> Iterator[Microbatch]:
        """Microbatches of at most `max_tokens_per_microbatch` padded tokens.

        As many on all ranks where these must run together, the last ones perhaps empty.
        """
        tokens = rollouts.step_tokens or rollouts.num_completion_tokens
        size = rollouts.step_rollouts or len(rollouts)
        microbatches = pack(
            rollouts,
            self.max_tokens_per_microbatch,
            pad_token_id=pad_token_id(self.tokenizer),
            temperature=self.sampling.temperature,
            device=self.device,
            token_weights=self.normalizer(rollouts.lengths, tokens, size),
        )
        return (
            same_number_per_process(microbatches, self.device)
            if self._shards_weights
            else microbatches
        )

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """[T] fp32 logprobs of the trained tokens under the policy, and [T] fp32 entropies."""
        assert self.policy is not None
        policy: Any = self.policy
        hidden = final_hidden(policy, microbatch.input_ids)
        predicts = microbatch.completion_mask[:, 1:]  # position t predicts token t + 1
        hidden = hidden[:, :-1][predicts]
        with gathered_through_backward(policy.get_output_embeddings(), hidden) as hidden:
            return token_logprobs(
                hidden,
                microbatch.completion_ids,
                head_of(policy),
                temperature=microbatch.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
                entropy_gradient=self.objective.entropy_coefficient != 0,
            )

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """A few of the step's rollouts, for `KLBudget` to take the KL of the step on.

        Args:
            num_rollouts: spread evenly over those of the step.
            max_tokens: of prompt and completion; what is longer is cut off, but for one token.
        """
        assert self.policy is not None
        assert self._minibatch is not None
        return rollout_probe(
            self.policy,
            self._minibatch.spread(num_rollouts).cut(max_tokens),
            temperature=self.sampling.temperature,
            pad_token_id=pad_token_id(self.tokenizer),
            device=self.device,
            mismatch=self._stats.values()["mismatch/kl"],
            together=self._shards_weights,
        )

    def _log_batch(self, rollouts: Rollouts) -> None:
        values = merged_metrics(of_all_processes(rollouts.metrics))
        truncated = values["rollout/truncated_frac"]
        if truncated > _MUCH_TRUNCATED and not self._told_truncated:
            rank_zero_warn(
                f"{truncated:.0%} of the first batch's completions were cut off at model.sampling."
                f"max_tokens={self.sampling.max_tokens}: raise it unless that is meant"
            )
        self._told_truncated = True
        for name in ("rollout/reward", "rollout/length"):
            self.log(name, values.pop(name), prog_bar=True, batch_size=len(rollouts))
        times = {f"time/{name}_s": seconds for name, seconds in self._phase_s.items()}
        times["time/step_s"] = sum(self._phase_s.values())
        # Lightning would count batches from 0, and differently after a resume.
        step = {"step": float(self.global_step)}
        self.log_dict({**values, **times, **self._stats.values(), **step}, batch_size=len(rollouts))

    # Validation, test and prediction: never a gradient, never the training seeds.

    def on_validation_epoch_start(self) -> None:
        self.eval_rows = []
        self._eval_metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        rows = self.predict_step(prompts, batch_idx)
        if not rows:
            return
        self.eval_rows += rows
        n = self.eval_completions

        def grouped(name: str) -> list[list[Any]]:
            return [[row[name] for row in rows[i : i + n]] for i in range(0, len(rows), n)]

        self._eval_metrics.update(
            torch.tensor(grouped("reward"), dtype=torch.float32),
            success_reward=self.success_reward,
            lengths=torch.tensor(grouped("length"), dtype=torch.int64),
            truncated=torch.tensor(grouped("truncated"), dtype=torch.bool),
            answers=grouped("answer"),
            sources=[group[0] for group in grouped("source")],
        )

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("eval")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        for name, value in self._eval_metrics.compute().items():
            self.log(f"{prefix}/{name}", value, prog_bar=name == "pass@1", sync_dist=True)
        self.log("step", float(self.global_step), sync_dist=True)

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """`eval_completions` completions per prompt with their rewards, as plain values."""
        return evaluate(
            prompts,
            sampler=self._sampler(self.eval_sampling, self.eval_completions),
            seed=self._seed("eval", batch_idx),
        )

    # Set-up.

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        if stage == "fit" and self.trainer.world_size > 1 and not isinstance(strategy, SketchMixin):
            raise ValueError(
                f"{type(strategy).__name__} averages gradients over {self.trainer.world_size} "
                f"processes at every microbatch, of which ranks may have different numbers: set "
                f"trainer.strategy to sketch_ddp, or trainer.devices=1 and trainer.num_nodes=1"
            )
        data = self._datamodule
        if hasattr(data, "columns"):
            check_columns(self.rewards, data.columns)
        if hasattr(data, "leave_out"):
            data.leave_out(partial(unusable_rows, self.rewards))
        if hasattr(data, "prompts_per_step"):
            checks.check_minibatches(data.prompts_per_step, self.num_minibatches)
        if stage == "fit":
            checks.check_steps(self.trainer, self.inner_epochs * self.num_minibatches)
        refills = self.dynamic_sampling.max_refills if self.dynamic_sampling else 0
        if stage == "fit" and refills and not hasattr(data, "refill"):
            raise ValueError(
                "model.dynamic_sampling draws prompts with the data module's "
                "`refill(count, seed)`, which this one lacks: set "
                "model.dynamic_sampling.max_refills=0 to drop prompts only"
            )

    def configure_model(self) -> None:
        super().configure_model()
        assert self.policy is not None
        if hasattr(self._datamodule, "longest_prompt"):
            checks.check_lengths(
                self._datamodule.longest_prompt,
                self.sampling.max_tokens,
                self.eval_sampling.max_tokens,
                min(context_length(self.policy), self.engine.max_model_len or sys.maxsize),
                self.max_tokens_per_microbatch,
            )
        if self._is_fitting and self.objective.reference_kl and self._reference is None:
            # Before a checkpoint is loaded: the reference is where the first run began.
            self._reference = Reference(self.policy)
            rank_zero_info(
                f"reference KL: {self._reference.num_bytes:,} bytes for the weights that train; "
                f"the frozen ones are shared with the policy."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = self._advantage_before or self._advantage_state()  # of before an interrupted batch
        if state:
            checkpoint["advantage"] = state

    def _advantage_state(self) -> dict[str, Any] | None:
        return (
            deepcopy(self.advantage.state_dict()) if hasattr(self.advantage, "state_dict") else None
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "advantage" in checkpoint and hasattr(self.advantage, "load_state_dict"):
            self.advantage.load_state_dict(checkpoint["advantage"])
