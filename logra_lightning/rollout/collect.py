"""From prompts to the rollouts that are trained on: sampling, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logra_lightning.distributed.processes import of_all_processes, process_index
from logra_lightning.engines.engine import Engine
from logra_lightning.objective.advantage import Advantage, is_constant
from logra_lightning.rewards import Reward, score
from logra_lightning.rollout.stats import merged_metrics, rollout_stats
from logra_lightning.seeding import derive_seed
from logra_lightning.types import PromptBatch, Rollouts, SamplingParams


@dataclass(frozen=True)
class DynamicSampling:
    """Drops prompts whose completions all got the same reward, and samples others in their place.

    Completions to which no reward applies do not count; a prompt with fewer than two others is
    dropped too.

    A refill draws as many prompts as are missing, at random from all training data, and may draw a
    prompt of the same batch again. If 3 of 8 prompts have equal rewards, the first refill draws 3
    prompts. If 1 of those has equal rewards too, the second refill draws 1, and so on. When the
    refills are used up, the step is made with the prompts that there are. Any equal rewards count,
    not only all 0 or all 1. Advantages are computed before prompts are dropped.

    Source: DAPO, arXiv 2503.14476.

    Args:
        max_refills: how many times new prompts may be drawn for one batch; with 0 prompts are
            dropped and not replaced.

    Raises:
        ValueError: the number is negative.
    """

    max_refills: int = 3

    def __post_init__(self) -> None:
        if self.max_refills < 0:
            raise ValueError(f"max_refills must not be negative, got {self.max_refills}")


@dataclass(frozen=True)
class Sampler:
    """Makes scored rollouts of prompts.

    Args:
        engine: samples the completions.
        decode: turns lists of token ids into texts without special tokens.
        rewards: functions that score a completion; their weighted sum is its reward.
        sampling: how completions are drawn.
        group_size: G, the number of completions per prompt.
    """

    engine: Engine
    decode: Callable[[Sequence[list[int]]], list[str]]
    rewards: Sequence[Reward]
    sampling: SamplingParams
    group_size: int

    def __call__(self, prompts: PromptBatch, seed: int) -> Rollouts:
        """Sample and score B = P * G rollouts; those of one prompt stand together.

        Their advantages are 0; `collect` fills them in.

        Args:
            prompts: P prompts.
            seed: what the completions depend on.
        """
        groups = self.engine.generate(
            prompts.prompt_ids, self.sampling, num_completions=self.group_size, seed=seed
        )
        completions = [completion for group in groups for completion in group]
        ids = [completion.token_ids for completion in completions]
        scores = score(self.rewards, prompts, self.decode(ids), ids)
        rollouts = Rollouts(
            prompt_ids=[ids for ids in prompts.prompt_ids for _ in range(self.group_size)],
            completions=completions,
            rewards=scores.total,
            rewards_by_name=scores.by_name,
            advantages=torch.zeros_like(scores.total),
            rows=[row for row in prompts.rows for _ in range(self.group_size)],
        )
        metrics = scores.metrics | rollout_stats(rollouts, self.group_size)
        return replace(rollouts, metrics=metrics)

    def take_part(self) -> None:
        """Sample nothing while other processes sample.

        Every process has to call the engine, because processes may share an engine or its weights.
        """
        self.engine.generate([], self.sampling, num_completions=self.group_size, seed=0)


def collect(
    prompts: PromptBatch,
    *,
    sampler: Sampler,
    advantage: Advantage,
    seed: int,
    dynamic_sampling: DynamicSampling | None = None,
    refill: Callable[[int, int], PromptBatch] | None = None,
) -> Rollouts:
    """Sample, score and select the rollouts to train on; every process must call it.

    Args:
        prompts: P prompts.
        sampler: makes scored rollouts of prompts.
        advantage: turns [P, G] rewards into [P, G] advantages.
        seed: what everything that is drawn here depends on.
        dynamic_sampling: how prompts with equal rewards are replaced; None keeps them.
        refill: function `(count, seed)` that returns `count` other prompts; needed where
            `dynamic_sampling` has refills.

    Returns:
        At most P * G rollouts with advantages. Their metrics cover everything that was sampled,
        also what was dropped.

    Raises:
        ValueError: the advantage returns another shape, or numbers that are not finite.
    """
    sampled = sampler(prompts, seed)
    refills = 0
    if dynamic_sampling is not None:
        for number in range(dynamic_sampling.max_refills):
            missing = len(prompts) - int(_has_signal(sampled, sampler.group_size).sum())
            if not any(of_all_processes(missing)):
                break
            if missing == 0:
                sampler.take_part()
                continue
            assert refill is not None
            others = refill(missing, derive_seed(seed, number, "refill"))
            more = sampler(others, derive_seed(seed, number, "rollout"))
            sampled, refills = joined([sampled, more]), refills + 1
    advantages = _advantages(advantage, sampled.rewards.view(-1, sampler.group_size))
    metrics = dict(sampled.metrics)
    metrics["rollout/zero_advantage_frac"] = (advantages == 0).to(torch.float32).mean().item()
    rollouts = replace(sampled, advantages=advantages.reshape(-1))
    if dynamic_sampling is not None:
        rollouts, dropped = _without_equal_groups(rollouts, sampler.group_size)
        metrics["rollout/dropped_groups"] = float(dropped)
        metrics["rollout/refills"] = float(refills)
    return replace(rollouts, metrics=metrics)


def _advantages(advantage: Advantage, rewards: Tensor) -> Tensor:
    """[P, G] advantages for this process's rewards, computed from those of all processes."""
    every = of_all_processes(rewards)
    first = sum(len(part) for part in every[: process_index()])
    found = advantage(torch.cat(every))
    wanted = (sum(map(len, every)), rewards.shape[1])
    if isinstance(found, Tensor) and found.shape == wanted:
        found = found.masked_fill(torch.cat(every).isnan(), 0.0)
    if not isinstance(found, Tensor) or found.shape != wanted or not found.isfinite().all():
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(type(found))
        raise ValueError(
            f"model.objective.advantage {type(advantage).__name__} must return finite [P, G] = "
            f"{list(wanted)} advantages (but where a reward is NaN, because none applies), got "
            f"{what}"
        )
    return found[first : first + len(rewards)].to(torch.float32)


def _has_signal(rollouts: Rollouts, group_size: int) -> Tensor:
    """[P] bool, True for each group whose rewards differ."""
    return ~is_constant(rollouts.rewards.view(-1, group_size))


def _without_equal_groups(rollouts: Rollouts, group_size: int) -> tuple[Rollouts, int]:
    """Drop the groups whose rewards are equal; return the others, and how many were dropped.

    Where no process has a group whose rewards differ, all groups stay, with advantages of 0: such a
    step is logged and changes nothing.
    """
    signal = _has_signal(rollouts, group_size)
    dropped = int((~signal).sum())
    if not any(of_all_processes(bool(signal.any()))):
        return replace(rollouts, advantages=torch.zeros_like(rollouts.advantages)), dropped
    chosen = signal.repeat_interleave(group_size).nonzero()[:, 0].tolist()
    return rollouts.select(chosen), dropped


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Join rollouts that one sampler made in several calls, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Rollouts(
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        completions=[completion for part in parts for completion in part.completions],
        rewards=torch.cat([part.rewards for part in parts]),
        rewards_by_name={
            name: torch.cat([part.rewards_by_name[name] for part in parts])
            for name in parts[0].rewards_by_name
        },
        advantages=torch.cat([part.advantages for part in parts]),
        rows=[row for part in parts for row in part.rows],
        metrics=merged_metrics([part.metrics for part in parts]),
    )
