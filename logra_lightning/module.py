"""`PolicyModule`: a language model, its rewards, and the whole algorithm in `training_step`.

The strategy decides how the step is made: with a sketching one the attention and MLP matrices
are updated by their sketches, with any other they are trained densely by AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from logra_lightning import checks, data, rollout
from logra_lightning.checkpoints.interrupted_batch import make_batch_again
from logra_lightning.distributed.processes import counts_over_processes, of_all_processes
from logra_lightning.engines import Engine
from logra_lightning.engines.owner import CloseEngine, EngineOwner
from logra_lightning.kl import KLProbe, first_not_finite
from logra_lightning.monitors import MonitorCheck
from logra_lightning.objective import GRPO, ObjectiveOptions, TokenMean
from logra_lightning.optim import AdamWOptions, OptimizerFactory, RelativeRowAdam
from logra_lightning.optim.adamw import dense_adamw, dense_metrics
from logra_lightning.optim.resume import tell_overruled
from logra_lightning.optim.scheduler import with_scheduler
from logra_lightning.policy import MemoryOptions, Reference, check_head, load, logprobs
from logra_lightning.rewards import Reward
from logra_lightning.rollout import DynamicSampling, EvaluationOptions
from logra_lightning.seeding import derive_seed, run_seed
from logra_lightning.start_line import tell_start
from logra_lightning.strategy import check_trainer_options, freeze_others_, load_policy_for
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import Microbatch, PromptBatch, Rollouts, SamplingParams


class PolicyModule(LightningModule):
    """Trains a causal language model by reinforcement learning on its own completions.

    Args:
        model: folder or hub name of a `transformers` causal language model with its tokenizer.
        rewards: terms of the reward.
        group_size: completions per prompt.
        sampling: how training completions are drawn.
        objective: what is optimized: advantage, loss and what is added to it.
        evaluation: how validation, test and prediction sample, and what counts as a success.
        memory: what trades memory against time; changes no result.
        dynamic_sampling: replaces prompts whose completions all got one reward; null keeps them.
        inner_epochs: how often a batch of rollouts is trained on.
        minibatches: optimizer steps of each of these epochs; a batch of 32 prompts and 4
            minibatches make 4 steps of 8 prompts.
        engine: what samples; `VLLMEngine` when left out and vLLM is installed, else `TorchEngine`.
        optimizer: rule for the sketched weights: `RelativeRowAdam` (the paper's) or `RowAdam`.
        adamw: options for what AdamW trains: all trained weights without sketches, the others
            beside the sketched ones with `train_others`.
        lr_scheduler: made from the optimizer, advanced once per step.
        train_others: also train embeddings, norms, biases and head. They are frozen otherwise.
        max_grad_norm: clip the norm of the gradient; null does not.
        model_kwargs: passed to `from_pretrained`, such as `{attn_implementation: eager}`; revision,
            trust_remote_code, token and the like hold for tokenizer, configs and exports too.
        seed: seed of the completions; null takes the command line's `seed_everything`.

    Raises:
        ValueError: options that cannot work together, here or when training is set up.
    """

    def __init__(
        self,
        model: str,
        rewards: list[Reward],
        group_size: int = 8,
        sampling: SamplingParams = SamplingParams(),
        objective: ObjectiveOptions = ObjectiveOptions(),
        evaluation: EvaluationOptions = EvaluationOptions(),
        memory: MemoryOptions = MemoryOptions(),
        dynamic_sampling: DynamicSampling | None = None,
        inner_epochs: int = 1,
        minibatches: int = 1,
        engine: Engine | None = None,
        optimizer: OptimizerFactory = RelativeRowAdam,
        adamw: AdamWOptions = AdamWOptions(),
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        train_others: bool = False,
        max_grad_norm: float | None = 1.0,
        model_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        checks.check_given(objective=objective, evaluation=evaluation, memory=memory)
        self.model_path = model
        self.rewards = rewards
        self.group_size = group_size
        self.sampling = sampling
        self.advantage = objective.advantage or GRPO()
        self.objective = objective.objective()
        self.normalizer = objective.normalizer or TokenMean()
        self.mask_truncated = objective.mask_truncated
        self.evaluation = evaluation.completed(sampling)
        self.memory = memory
        self.dynamic_sampling = dynamic_sampling
        self.inner_epochs = inner_epochs
        self.num_minibatches = minibatches
        self.optimizer = optimizer
        self.adamw = adamw
        self.lr_scheduler = lr_scheduler
        self.train_others = train_others
        self.max_grad_norm = max_grad_norm
        self.model_kwargs = model_kwargs or {}
        self.seed = run_seed(seed)
        checks.check_options(self, objective, self.evaluation, memory)
        self.policy: Any = None  # a model of transformers, once it has been configured
        self.tokenizer: Any = None
        self.rollouts: Rollouts | None = None
        self.eval_rows: list[dict[str, Any]] = []
        self._owner = EngineOwner(engine)
        self.engine = self._owner.engine
        self._numbers = rollout.BatchLog()
        self._eval_metrics = rollout.EvalMetrics(self.evaluation.pass_k or ())
        self._reference: Reference | None = None
        self._loaded_step = 0  # of a checkpoint that is evaluated
        self._minibatch: Any = None  # the rollouts of the step
        self._advantage_before: dict[str, Any] | None = None

    # One batch, from prompts to optimizer steps.

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        self._numbers.begin_batch()
        self._advantage_before = deepcopy(self.advantage.state_dict())
        with self._phase("rollout"):
            self.rollouts = self.collect(prompts)
            self.engine.sleep()
        for minibatch in self.minibatches(self.rollouts):
            self._minibatch = minibatch
            self._numbers.stats.begin_step()
            has_signal = any(of_all_processes(bool((minibatch.advantages != 0).any())))
            with self._phase("train"):
                for microbatch in self.pack(minibatch):
                    logprobs, entropies = self.token_logprobs(microbatch)
                    loss = self.objective(logprobs, entropies, microbatch, self._numbers.stats)
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
        return rollout.collect(
            prompts,
            sampler=self._sampler(self.sampling, self.group_size),
            advantage=self.advantage,
            seed=self._seed("rollout", self.global_step),
            dynamic_sampling=self.dynamic_sampling,
            refill=getattr(self._datamodule, "refill", None),
        )

    def minibatches(self, rollouts: Rollouts) -> Iterator[Rollouts]:
        """The rollouts that each optimizer step of a batch trains on.

        There are always `inner_epochs` x `minibatches` of them, some perhaps without rollouts.
        """
        with self._phase("logprobs"):
            if self._reference is not None:
                with self._reference.weights():
                    rollouts = replace(rollouts, reference_logprobs=self.logprobs(rollouts))
            if self.inner_epochs * self.num_minibatches > 1:
                rollouts = replace(rollouts, old_logprobs=self.logprobs(rollouts))
        for _ in range(self.inner_epochs):
            seed = derive_seed(self.seed, self.global_step, 0, "minibatches")  # of all processes
            for part in rollout.minibatches(
                rollouts, self.group_size, self.num_minibatches, seed=seed
            ):
                part = rollout.trained_ones(part, mask_truncated=self.mask_truncated)
                tokens, size = counts_over_processes(part.num_completion_tokens, len(part))
                yield replace(part, step_tokens=tokens, step_rollouts=size)

    def pack(self, rollouts: Rollouts) -> Iterator[Microbatch]:
        """Microbatches of at most `memory.max_tokens_per_microbatch` padded tokens.

        Where weights are sharded, all processes make the same number of them, and the last ones of
        a process may be empty.
        """
        microbatches = rollout.pack(
            rollouts,
            self.memory.max_tokens_per_microbatch,
            temperature=self.sampling.temperature,
            device=self.device,
            token_weights=self.normalizer(rollouts.trained_lengths, *rollouts.step_counts),
        )
        if self._shards_weights:
            return rollout.same_number_per_process(microbatches, self.device)
        return microbatches

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """[T] fp32 logprobs of the trained tokens under the policy, and [T] fp32 entropies."""
        return logprobs.microbatch_logprobs(
            self.policy,
            microbatch,
            chunk_tokens=self.memory.logprob_chunk_tokens,
            entropy_gradient=self.objective.entropy_coefficient != 0,
        )

    def logprobs(self, rollouts: Rollouts) -> list[Tensor]:
        """B tensors of [n] fp32 logprobs of each completion, under the weights as they are."""
        return logprobs.completion_logprobs(self.pack(rollouts), self.token_logprobs, len(rollouts))

    def take_step(self) -> None:
        """One optimizer step on everything that was accumulated."""
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict(dense_metrics(optimizer.optimizer))
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """A few of the step's rollouts, for `KLBudget` to take the KL of the step on.

        Args:
            num_rollouts: how many, spread evenly over those of the step.
            max_tokens: prompts and completions are cut off here together, but for one token.
        """
        return rollout.rollout_probe(
            self.policy,
            self._minibatch.spread(num_rollouts).cut(max_tokens),
            temperature=self.sampling.temperature,
            device=self.device,
            mismatch=self._numbers.stats.values()["mismatch/kl"],
            together=self._shards_weights,
        )

    def first_not_finite(self) -> str:
        """First module whose output is not finite on the step's rollouts; empty without one."""
        return first_not_finite(self.policy, partial(self.logprobs, self._minibatch))

    def _log_batch(self, rollouts: Rollouts) -> None:
        values = self._numbers.values(rollouts, self.sampling.max_tokens)
        for name in ("rollout/reward", "rollout/length"):
            if name in values:  # there is no mean reward where none applies
                self.log(name, values.pop(name), prog_bar=True, batch_size=len(rollouts))
        # Lightning would count batches from 0, and differently after a resume.
        values["step"] = float(self.global_step)
        self.log_dict(values, batch_size=len(rollouts))

    # Validation, test and prediction: never a gradient, never the training seeds.

    def on_validation_epoch_start(self) -> None:
        self.eval_rows = []
        self._eval_metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        rows = self.predict_step(prompts, batch_idx)
        self.eval_rows += rows
        self._eval_metrics.update_rows(
            rows, self.evaluation.completions, self.evaluation.success_reward
        )

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("eval")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        for name, value in self._eval_metrics.compute().items():
            self.log(f"{prefix}/{name}", value, prog_bar=name == "pass@1", sync_dist=True)
        self.log("step", float(self._loaded_step or self.global_step), sync_dist=True)

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """`evaluation.completions` completions per prompt with their rewards, as plain values."""
        assert isinstance(self.evaluation.sampling, SamplingParams)
        sampler = self._sampler(self.evaluation.sampling, self.evaluation.completions)
        return rollout.evaluate(prompts, sampler=sampler, seed=self._seed("eval", batch_idx))

    # Set-up: what is known to go wrong is refused here, before the first rollout.

    def configure_callbacks(self) -> list[Any]:
        # The first hook of all: before Lightning's own check, whose message names no way out.
        check_trainer_options(self.trainer)
        return [CloseEngine(self._owner), MonitorCheck()]

    def setup(self, stage: str) -> None:
        checks.check_trainer(self, stage)
        checks.check_data(self, self._datamodule, stage)
        self._owner.expect(checks.longest_rollout(self, self._datamodule), self.trainer.precision)

    def configure_model(self) -> None:
        """Load the policy, once; the precision decides the dtype of its weights."""
        strategy = self.trainer.strategy
        if self.policy is None:
            self.tokenizer = load_tokenizer(self.model_path, **self.model_kwargs)
            self.policy = load_policy_for(strategy, self.model_path, **self.model_kwargs)
            if self.memory.activation_checkpointing:
                load.checkpoint_activations_(self.policy)
        if self._is_fitting:
            freeze_others_(self.policy, strategy, self.adamw, train_others=self.train_others)
        if self._is_fitting and self.objective.reference_kl and self._reference is None:
            # Before a checkpoint is loaded: the reference is where the first run began.
            self._reference = Reference(self.policy)
            rank_zero_info(f"{self._reference}")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Every cast and move of the module, which under bf16-true would round buffers too."""
        with load.exact_buffers(self):
            return super()._apply(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        strategy = self.trainer.strategy
        sketches = getattr(strategy, "sketches", None)
        options, parameters = (self.adamw, self.max_grad_norm), self.named_parameters()
        optimizer: Any
        if sketches is None:
            optimizer = dense_adamw(parameters, *options, type(strategy).__name__)
        else:
            optimizer = self.optimizer(parameters, sketches, *options)
        optimizer.counts.first_not_finite = self.first_not_finite
        return with_scheduler(optimizer, self.lr_scheduler)

    def on_fit_start(self) -> None:
        self._loaded_step = 0
        check_head(self.policy)
        tell_start(self)

    def on_train_start(self) -> None:
        data.follow_loader(self.trainer)
        tell_overruled(self.trainer.optimizers, self.trainer.lr_scheduler_configs)

    # Engine: what callbacks and samplers ask for.

    def ready_engine(self) -> Engine:
        """The engine, started with the policy as it stands when it is first asked for."""
        return self._owner.ready(self.policy, self.tokenizer)

    def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        """Texts without special tokens."""
        return self.tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    def _sampler(self, sampling: SamplingParams, num_completions: int) -> rollout.Sampler:
        engine = self.ready_engine()
        if self._is_fitting:
            self._owner.check_version(self.global_step)
        return rollout.Sampler(engine, self.decode, self.rewards, sampling, num_completions)

    def teardown(self, stage: str) -> None:
        self._owner.close()

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the policy was made from, for exports, and let a broken batch be made again."""
        source = load.policy_source(self.model_path, self.policy, self.model_kwargs)
        checkpoint["policy_source"] = source
        make_batch_again(checkpoint, self.trainer)
        checkpoint["advantage"] = self._advantage_before or self.advantage.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a sketching run for a dense one; RowAdam refuses the reverse."""
        if self._is_fitting:
            checks.check_same_kind_of_run(checkpoint, self.trainer.strategy)
        else:
            self._loaded_step = checkpoint["global_step"]
        self.advantage.load_state_dict(checkpoint.get("advantage", {}))

    def _seed(self, purpose: str, number: int) -> int:
        return derive_seed(self.seed, number, self.global_rank, purpose)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._numbers.phase(name, self.device)

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def _shards_weights(self) -> bool:
        return getattr(self.trainer.strategy, "shards_weights", False)

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)
