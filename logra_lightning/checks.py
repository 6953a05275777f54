"""What can be known to go wrong before the first rollout, with the numbers and what to change."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from logra_lightning.data.filters import check_token_ids
from logra_lightning.objective import Advantage, ObjectiveOptions
from logra_lightning.policy import MemoryOptions, context_length, fixed_context_length
from logra_lightning.policy.load import check_model_kwargs, given_dtype, load_config
from logra_lightning.rewards import Reward, check_columns, unusable_rows
from logra_lightning.rollout import EvaluationOptions
from logra_lightning.strategy import SketchMixin
from logra_lightning.strategy.mixin import SUPPORTED_PRECISION
from logra_lightning.types import SamplingParams

# When a module is made.


def check_options(
    module: Any,
    objective: ObjectiveOptions,
    evaluation: EvaluationOptions,
    memory: MemoryOptions,
) -> None:
    """Raise ValueError where options of a `PolicyModule` cannot work together.

    Args:
        module: with its plain options set.
        objective: its group `model.objective`.
        evaluation: its group `model.evaluation`, completed.
        memory: its group `model.memory`.
    """
    check_rewards(module.rewards)
    check_sampling(module.sampling)
    check_at_least_one(
        {
            "group_size": module.group_size,
            "evaluation.completions": evaluation.completions,
            "inner_epochs": module.inner_epochs,
            "minibatches": module.num_minibatches,
            "memory.max_tokens_per_microbatch": memory.max_tokens_per_microbatch,
            "memory.logprob_chunk_tokens": memory.logprob_chunk_tokens,
        }
    )
    drops_groups = module.dynamic_sampling is not None
    check_groups(module.group_size, module.advantage, drops_groups=drops_groups)
    assert isinstance(evaluation.sampling, SamplingParams)
    check_evaluation(evaluation.completions, evaluation.pass_k or [], evaluation.sampling)
    check_numbers(
        {
            "objective.entropy_coefficient": objective.entropy_coefficient,
            "evaluation.success_reward": evaluation.success_reward,
        }
    )
    check_model_kwargs(module.model_kwargs)
    norm = module.max_grad_norm
    if norm is not None and not norm > 0:
        raise ValueError(f"model.max_grad_norm must be positive or null, got {norm}")


def check_given(**groups: Any) -> None:
    """Raise ValueError where a group of options is None; leaving it out takes the defaults."""
    for name, value in groups.items():
        if value is None:
            raise ValueError(null_group(name))


def null_group(name: str) -> str:
    """What to say where a group of options of the model is null."""
    return f"model.{name} is null: leave it out for its defaults, or set the options in it"


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Raise ValueError where there are none, or two of one name."""
    if not rewards:
        raise ValueError("model.rewards is empty: name at least one reward")
    labels = [reward.label for reward in rewards]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two rewards have the same name among {labels}: set their names")


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError where completions would not come from the policy that is trained."""
    if sampling.temperature == 0:
        raise ValueError(
            "model.sampling.temperature is 0: training needs completions that differ, so it must "
            "be positive (1.0 is usual); model.evaluation.sampling may be greedy"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"model.sampling has top_p={sampling.top_p} and top_k={sampling.top_k}: completions "
            f"would come from another distribution than the one that is trained, so leave them at "
            f"1 and 0; model.evaluation.sampling may use them"
        )


def check_groups(group_size: int, advantage: Advantage, *, drops_groups: bool) -> None:
    """Raise ValueError where a group is too small for what compares its completions."""
    if group_size < advantage.min_group_size:
        raise ValueError(
            f"model.group_size is {group_size}, but {type(advantage).__name__} compares "
            f"completions of the same prompt: set it to at least {advantage.min_group_size}"
        )
    if drops_groups and group_size < 2:
        raise ValueError(
            f"model.group_size is {group_size}, so every group has equal rewards and "
            f"model.dynamic_sampling would drop them all: set group_size to at least 2 or leave "
            f"dynamic_sampling out"
        )


def check_evaluation(completions: int, pass_k: Sequence[int], sampling: SamplingParams) -> None:
    """Raise ValueError where validation's completions are all the same, or fewer than a k."""
    if completions > 1 and (sampling.temperature == 0 or sampling.top_k == 1):
        raise ValueError(
            f"model.evaluation.completions is {completions}, but greedy completions are all the "
            f"same: set model.evaluation.sampling with a temperature above 0 and top_k other than 1"
        )
    if not all(1 <= k <= completions for k in pass_k):
        raise ValueError(
            f"model.evaluation.pass_k is {list(pass_k)}: pass@k needs k from 1 to "
            f"model.evaluation.completions={completions}"
        )


def check_at_least_one(options: dict[str, int]) -> None:
    """Raise ValueError where an option of the model, by its name behind `model.`, is below 1."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"model.{name} must be at least 1, got {value}")


def check_numbers(options: dict[str, float]) -> None:
    """Raise ValueError where an option of the model, likewise, is not a finite number."""
    for name, value in options.items():
        if not math.isfinite(value):
            raise ValueError(f"model.{name} must be a finite number, got {value}")


# When a run is set up.


def check_trainer(module: Any, stage: str) -> None:
    """Raise ValueError where a Trainer cannot make the steps of a `PolicyModule`."""
    strategy, processes = module.trainer.strategy, module.trainer.world_size
    check_dtype(module.model_kwargs, module.trainer.precision)
    if stage != "fit":
        return
    if processes > 1 and not isinstance(strategy, SketchMixin):
        raise ValueError(
            f"{type(strategy).__name__} averages gradients over {processes} processes at every "
            f"microbatch, of which processes may have different numbers: set trainer.strategy to "
            f"sketch_ddp, or trainer.devices=1 and trainer.num_nodes=1"
        )
    check_steps(module.trainer, module.inner_epochs * module.num_minibatches)


def check_dtype(model_kwargs: Mapping[str, Any], precision: str) -> None:
    """Raise ValueError where weights would have a dtype that the precision does not stand for."""
    if precision not in SUPPORTED_PRECISION:
        raise ValueError(
            f"trainer.precision is {precision}, which a policy is not trained in: set it to "
            f"{', '.join(SUPPORTED_PRECISION)}"
        )
    given = given_dtype(model_kwargs)
    made = torch.bfloat16 if precision == "bf16-true" else torch.float32
    if given not in (None, made):
        raise ValueError(
            f"model.model_kwargs has dtype {given}, but trainer.precision {precision} makes "
            f"weights of {made}: leave dtype out, and set trainer.precision"
        )


def check_data(module: Any, data: Any, stage: str) -> None:
    """Raise ValueError where a data module has not what a `PolicyModule` asks for.

    Rows that a reward cannot score are refused or left out, as the data module's options say.
    """
    if hasattr(data, "columns"):
        check_columns(module.rewards, data.columns)
    if hasattr(data, "leave_out"):
        data.leave_out(partial(unusable_rows, module.rewards))
    if hasattr(data, "prompts_per_step"):
        check_minibatches(data.prompts_per_step, module.num_minibatches)
    refills = module.dynamic_sampling.max_refills if module.dynamic_sampling else 0
    if stage == "fit" and refills and not hasattr(data, "refill"):
        raise ValueError(
            "model.dynamic_sampling draws prompts with the data module's `refill(count, seed)`, "
            "which this one lacks: set model.dynamic_sampling.max_refills=0 to drop prompts only"
        )
    if stage == "fit" and refills and module.trainer.overfit_batches:
        raise ValueError(
            "trainer.overfit_batches trains on the same prompts again and again, but "
            "model.dynamic_sampling puts others in their place: set "
            "model.dynamic_sampling.max_refills=0, or leave one of the two out"
        )
    check_data_fits(module, data)


def longest_rollout(module: Any, data: Any) -> int | None:
    """Most tokens of a prompt and its completion together; None where the data does not tell."""
    if not hasattr(data, "largest"):
        return None
    longest, _ = data.largest(len)
    return longest + max(module.sampling.max_tokens, module.evaluation.sampling.max_tokens)


def check_data_fits(module: Any, data: Any) -> None:
    """Raise ValueError where prompts and completions fit neither model, engine nor microbatch."""
    if hasattr(data, "largest"):
        config = load_config(module.model_path, **module.model_kwargs)
        largest, row_name = data.largest(max)
        check_token_ids(largest, row_name, config.get_text_config().vocab_size)
        longest, row_name = data.largest(len)
        check_rope(longest_rollout(module, data) or 0, fixed_context_length(config))
        check_lengths(
            longest,
            row_name,
            module.sampling.max_tokens,
            module.evaluation.sampling.max_tokens,
            min(context_length(config), module.engine.max_model_len or sys.maxsize),
            module.memory.max_tokens_per_microbatch,
        )


def check_rope(longest: int, limit: int | None) -> None:
    """Raise ValueError where the logprobs of a row would depend on the rows beside it.

    Args:
        longest: largest number of tokens of a prompt and its completion.
        limit: what `fixed_context_length` says.
    """
    if limit is not None and longest > limit:
        raise ValueError(
            f"a rollout may have {longest} tokens, but beyond {limit} this model's rotary "
            f"frequencies (longrope or dynamic) depend on the longest row of a batch, and so do "
            f"logprobs: lower model.sampling.max_tokens or data.init_args.max_prompt_tokens until "
            f"both together are at most {limit}"
        )


def check_same_kind_of_run(checkpoint: dict[str, Any], strategy: Strategy) -> None:
    """Raise ValueError where a dense run would go on from a checkpoint of a sketching one."""
    states = checkpoint.get("optimizer_states", [])
    if states and "sketch" in states[0] and not isinstance(strategy, SketchMixin):
        raise ValueError(
            f"the checkpoint is of a run with sketches, but {type(strategy).__name__} has none: "
            f"resume with trainer.strategy as it was"
        )


def check_steps(trainer: Trainer, steps_per_batch: int) -> None:
    """Raise ValueError where training or saving would stop in the middle of a batch's steps."""
    found = {"trainer.max_steps": trainer.max_steps}
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_train_steps", 0)
        found[f"every_n_train_steps of {type(callback).__name__}"] = every
    for name, steps in found.items():
        if steps > 0 and steps % steps_per_batch:
            nearest = max(1, round(steps / steps_per_batch)) * steps_per_batch
            raise ValueError(
                f"{name} is {steps}, but a batch has model.inner_epochs x model.minibatches = "
                f"{steps_per_batch} steps, which are made together: the nearest that works is "
                f"{nearest}"
            )


def check_minibatches(prompts_per_step: int, minibatches: int) -> None:
    """Raise ValueError where the prompts of a batch cannot be shared out among its steps."""
    if prompts_per_step % minibatches:
        nearest = max(1, round(prompts_per_step / minibatches)) * minibatches
        raise ValueError(
            f"data.init_args.prompts_per_step={prompts_per_step} cannot be split into "
            f"model.minibatches={minibatches} steps of whole groups: the nearest that can is "
            f"{nearest}"
        )


def check_lengths(
    longest_prompt: int,
    row_name: str,
    max_tokens: int,
    eval_max_tokens: int,
    context: int,
    max_tokens_per_microbatch: int,
) -> None:
    """Raise ValueError when prompt and completion fit neither the model nor a microbatch.

    Args:
        longest_prompt: number of tokens of the longest prompt.
        row_name: name of the row that has it.
        max_tokens: number of tokens of the longest training completion.
        eval_max_tokens: number of tokens of the longest validation completion.
        context: number of tokens that both the model and the engine can read.
        max_tokens_per_microbatch: padded tokens of one forward and backward pass.
    """
    total = longest_prompt + max(max_tokens, eval_max_tokens)
    if total > context:
        raise ValueError(
            f"the longest prompt, {row_name}, has {longest_prompt} tokens and completions up to "
            f"{max(max_tokens, eval_max_tokens)}, {total} in all, but the model and its engine "
            f"take {context}: lower model.sampling.max_tokens or data.init_args.max_prompt_tokens, "
            f"or raise model.engine.init_args.max_model_len where that is set"
        )
    total = longest_prompt + max_tokens
    if total > max_tokens_per_microbatch:
        raise ValueError(
            f"a rollout may have {total} tokens (the longest prompt, {row_name}, has "
            f"{longest_prompt}, the completion {max_tokens}), more than "
            f"model.memory.max_tokens_per_microbatch={max_tokens_per_microbatch}: raise it to at "
            f"least {total}"
        )
