"""`collect`: prompts to rollouts, by the engine, the rewards and the advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
