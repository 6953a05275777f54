"""Prompts to scored completions: `collect` for training, `evaluate` for looking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from logra_lightning.objective.advantage import Advantage
from logra_lightning.rewards.reward import Reward, score
from logra_lightning.rollout.engine import Engine
from logra_lightning.types import PromptBatch, Rollouts, SamplingParams


def collect(
    prompts: PromptBatch,
    *,
    engine: Engine,
    decode: Callable[[Sequence[list[int]]], list[str]],
    rewards: Sequence[Reward],
    advantage: Advantage,
    sampling: SamplingParams,
    group_size: int,
    seed: int,
) -> Rollouts:
    """The scored completions of one batch.

    Args:
        prompts: P prompts.
        engine: samples the completions.
        decode: B lists of token ids to B texts without special tokens.
        rewards: terms of the reward.
        advantage: [P, G] rewards to [P, G] advantages.
        sampling: how to draw.
        group_size: G, completions per prompt.
        seed: for the engine.

    Returns:
        B = P * G rollouts; `num_completion_tokens` counts these alone.
    """
    groups = engine.generate(prompts.prompt_ids, sampling, num_completions=group_size, seed=seed)
    completions = [completion for group in groups for completion in group]
    completion_ids = [completion.token_ids for completion in completions]
    total, by_name = score(rewards, prompts, decode(completion_ids), completion_ids)
    return Rollouts(
        prompt_ids=[ids for ids in prompts.prompt_ids for _ in range(group_size)],
        completions=completions,
        rewards=total,
        rewards_by_name=by_name,
        advantages=advantage(total.view(len(prompts), group_size)).reshape(-1),
        num_completion_tokens=sum(map(len, completion_ids)),
    )


def evaluate(
    prompts: PromptBatch,
    *,
    engine: Engine,
    decode: Callable[[Sequence[list[int]]], list[str]],
    rewards: Sequence[Reward],
    sampling: SamplingParams,
    seed: int,
) -> list[dict[str, Any]]:
    """One completion per prompt with its reward, as plain values.

    Args:
        prompts: P prompts.
        engine: samples the completions.
        decode: lists of token ids to texts without special tokens.
        rewards: terms of the reward.
        sampling: how to draw.
        seed: for the engine.

    Returns:
        P rows of `row`, `prompt`, `completion`, `reward`, `length` (tokens) and `truncated`.
    """
    groups = engine.generate(prompts.prompt_ids, sampling, num_completions=1, seed=seed)
    completions = [completion for (completion,) in groups]
    completion_ids = [completion.token_ids for completion in completions]
    texts = decode(completion_ids)
    total, _ = score(rewards, prompts, texts, completion_ids)
    return [
        {
            "row": row,
            "prompt": prompt,
            "completion": text,
            "reward": reward,
            "length": len(completion.token_ids),
            "truncated": completion.truncated,
        }
        for row, prompt, text, reward, completion in zip(
            prompts.rows,
            decode(prompts.prompt_ids),
            texts,
            total.tolist(),
            completions,
            strict=True,
        )
    ]
