"""Prompts to scored completions: `collect` for training, `evaluate` for looking."""

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
    """Drop prompts whose completions all got the same reward, and sample others in their place.

    Rewards are compared up to rounding, so a group of equal rewards other than 0 and 1 is dropped
    too; advantages are taken before anything is dropped. New prompts are drawn at random from all
    training data, also those of the batch. Where refills run out, the step is made with what there
    is.

    Source: DAPO, arXiv 2503.14476.

    Args:
        max_refills: times that prompts are drawn for one step; 0 only drops.

    Raises:
        ValueError: a negative number.
    """

    max_refills: int = 3

    def __post_init__(self) -> None:
        if self.max_refills < 0:
            raise ValueError(f"max_refills must not be negative, got {self.max_refills}")


@dataclass(frozen=True)
class Sampler:
    """What makes rollouts of prompts.

    Args:
        engine: samples the completions.
        decode: lists of token ids to texts without special tokens.
        rewards: terms of the reward.
        sampling: how to draw.
        group_size: G, completions per prompt.
    """

    engine: Engine
    decode: Callable[[Sequence[list[int]]], list[str]]
    rewards: Sequence[Reward]
    sampling: SamplingParams
    group_size: int

    def __call__(self, prompts: PromptBatch, seed: int) -> Rollouts:
        """B = P * G scored rollouts, those of one prompt together; advantages are 0."""
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
        """Without prompts, in what the other ranks sample: they may share an engine, or weights."""
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
    """The rollouts to train on, with advantages.

    Args:
        prompts: P prompts.
        sampler: makes rollouts of prompts.
        advantage: [P, G] rewards to [P, G] advantages.
        seed: for everything that is drawn.
        dynamic_sampling: None keeps every group.
        refill: `(count, seed)` to that many other prompts; needed where there are refills.

    Returns:
        At most P * G rollouts. Their metrics are those of all that was sampled.
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
    """[P, G] advantages of this rank's rewards, among those of all ranks."""
    every = of_all_processes(rewards)
    first = sum(len(part) for part in every[: process_index()])
    found = advantage(torch.cat(every))
    wanted = (sum(map(len, every)), rewards.shape[1])
    if not isinstance(found, Tensor) or found.shape != wanted or not found.isfinite().all():
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(type(found))
        raise ValueError(
            f"model.advantage {type(advantage).__name__} must return finite [P, G] = "
            f"{list(wanted)} advantages, got {what}"
        )
    return found[first : first + len(rewards)].to(torch.float32)


def _has_signal(rollouts: Rollouts, group_size: int) -> Tensor:
    """[P] bool, which groups have rewards that differ."""
    return ~is_constant(rollouts.rewards.view(-1, group_size))


def _without_equal_groups(rollouts: Rollouts, group_size: int) -> tuple[Rollouts, int]:
    """The groups whose rewards differ, and how many do not.

    Where none do on any rank, all stay, without advantage: a step that is logged and changes
    nothing.
    """
    signal = _has_signal(rollouts, group_size)
    dropped = int((~signal).sum())
    if not any(of_all_processes(bool(signal.any()))):
        return replace(rollouts, advantages=torch.zeros_like(rollouts.advantages)), dropped
    chosen = signal.repeat_interleave(group_size).nonzero()[:, 0].tolist()
    return rollouts.select(chosen), dropped


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Rollouts of several calls of one sampler, one after the other."""
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
