"""Validation: completions of each prompt as plain rows, and the means that are logged of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from logra_lightning.distributed.processes import of_all_processes
from logra_lightning.rewards import voted_answers
from logra_lightning.rollout.collect import Sampler
from logra_lightning.rollout.pass_at_k import average_at_n, majority_at_n, pass_at_k
from logra_lightning.types import PromptBatch


def evaluate(prompts: PromptBatch, *, sampler: Sampler, seed: int) -> list[dict[str, Any]]:
    """Completions of each prompt with their reward, as plain values.

    Args:
        prompts: P prompts.
        sampler: makes rollouts of prompts; its temperature may be 0.
        seed: for the engine.

    Returns:
        P * G rows of `row`, `source`, `prompt`, `completion`, `answer` (what it counts for in a
        vote, or None), `reward` (None where none applies), `length` (tokens) and `truncated`.
    """
    if len(prompts) == 0:  # this process's share of a last, small batch
        sampler.take_part()
        return []
    rollouts = sampler(prompts, seed)
    texts = sampler.decode([completion.token_ids for completion in rollouts.completions])
    sources = prompts.columns.get("source", [None] * len(prompts))
    columns = {
        "row": rollouts.rows,
        "source": [source for source in sources for _ in range(sampler.group_size)],
        "prompt": [
            t for t in sampler.decode(prompts.prompt_ids) for _ in range(sampler.group_size)
        ],
        "completion": texts,
        "answer": voted_answers(sampler.rewards, texts) if sampler.group_size > 1 else texts,
        "reward": [None if math.isnan(reward) else reward for reward in rollouts.rewards.tolist()],
        "length": rollouts.lengths.tolist(),
        "truncated": rollouts.truncated.tolist(),
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


_Means = dict[tuple[str | None, str], MeanMetric]  # by source and name


class EvalMetrics:
    """What a validation says, over all prompts and for each source of prompts.

    It is no `nn.Module`, so a `LightningModule` holds it as a plain attribute
    (`self.eval_metrics = EvalMetrics(ks)`), where it enters no state_dict and is neither cast nor
    moved. Call `reset()` when a validation begins, `update()` for each batch, and `compute()` at
    the end, in every process: the values are means over the prompts of all processes, to be logged
    without `sync_dist`.

    Args:
        ks: the k of each pass@k to compute beside pass@1, none above the completions per prompt.

    Raises:
        ValueError: a k below 1.
    """

    def __init__(self, ks: Sequence[int] = ()) -> None:
        self.ks = sorted({1, *ks})
        if self.ks[0] < 1:
            raise ValueError(f"pass@k needs a k of at least 1, got {self.ks[0]}")
        self.reset()

    def reset(self) -> None:
        """Forget all prompts."""
        self._n = 0
        self._means: _Means = {}

    def update(
        self,
        rewards: Tensor,
        success_reward: float,
        lengths: Tensor,
        truncated: Tensor,
        answers: Sequence[Sequence[str | None]] | None,
        sources: Sequence[str | None],
    ) -> None:
        """Add P prompts with n completions each; n stays the same until `reset()`.

        Args:
            rewards: [P, n] fp32; NaN where no reward applies. Such a completion counts in `length`,
                `truncated_frac` and `unscored_frac` alone.
            success_reward: a completion with at least this reward is a success.
            lengths: [P, n], completion tokens.
            truncated: [P, n] bool, whether a completion was cut off.
            answers: P lists of n answers, see `majority_at_n`; None leaves maj@n out.
            sources: P names of where the prompts come from; None stands for no source.

        Raises:
            ValueError: shapes that do not fit, another n than before, or a k above n.
        """
        shapes = [list(values.shape) for values in (rewards, lengths, truncated)]
        if rewards.ndim != 2 or shapes[1:] != shapes[:-1] or len(sources) != len(rewards):
            raise ValueError(
                f"rewards, lengths and truncated must be [prompts, completions] and sources one "
                f"name per prompt, got {shapes} and {len(sources)} sources"
            )
        n = rewards.shape[1]
        if self._n not in (0, n):
            raise ValueError(
                f"a validation must draw equally many completions of each prompt, got {n} after "
                f"{self._n}"
            )
        self._n = n
        rewards = rewards.cpu()
        values = _successes(rewards, success_reward, self.ks, answers)
        plain = {
            "reward": rewards,
            "length": lengths,
            "truncated_frac": truncated,
            "unscored_frac": rewards.isnan(),
        }
        values |= {k: v.cpu().to(torch.float64).nanmean(dim=1) for k, v in plain.items()}
        for source in dict.fromkeys(sources):
            of_source = torch.tensor([other == source for other in sources], device="cpu")
            for name, per_prompt in values.items():
                mean = MeanMetric(nan_strategy="disable", sync_on_compute=False)
                mean.set_dtype(torch.float64)
                mean.update(per_prompt[of_source & ~per_prompt.isnan()])
                _merge(self._means, (source, name), mean)

    def update_rows(
        self, rows: Sequence[dict[str, Any]], completions: int, success_reward: float
    ) -> None:
        """Add the rows of `evaluate`; there may be none.

        Args:
            rows: P * n rows, the n completions of a prompt standing together.
            completions: n.
            success_reward: see `update`.
        """
        if not rows:
            return

        def grouped(name: str) -> list[list[Any]]:
            values = [row[name] for row in rows]
            return [values[i : i + completions] for i in range(0, len(rows), completions)]

        rewards = [[math.nan if r is None else r for r in group] for group in grouped("reward")]
        self.update(
            torch.tensor(rewards, dtype=torch.float32),
            success_reward=success_reward,
            lengths=torch.tensor(grouped("length"), dtype=torch.int64),
            truncated=torch.tensor(grouped("truncated"), dtype=torch.bool),
            answers=grouped("answer"),
            sources=[group[0] for group in grouped("source")],
        )

    def compute(self) -> dict[str, float]:
        """Means over the prompts of all processes; every process must call it.

        Returns:
            `pass@1` and each `pass@k`, with n > 1 completions per prompt also `avg@<n>` and
            `maj@<n>`, then `reward`, `length` (tokens), `truncated_frac` and `unscored_frac` (share
            of completions to which no reward applies). Where the prompts come from more than one
            source, the same of each, as `<source>/<name>`. Empty without prompts; NaN where no
            prompt has completions to tell it by.
        """
        total: _Means = {}
        by_source: _Means = {}
        # Whole objects: processes may have seen other sources, so that they could not sync metric
        # by metric.
        for means in of_all_processes(self._means):
            for (source, name), mean in means.items():
                _merge(total, (None, name), mean)
                _merge(by_source, (source, name), mean)
        found = {name: mean.compute().item() for (_, name), mean in total.items()}
        if len({source for source, _ in by_source}) > 1:
            for (source, name), mean in by_source.items():
                if source is not None:
                    found[f"{source}/{name}"] = mean.compute().item()
        return found


def _successes(
    rewards: Tensor,
    success_reward: float,
    ks: Sequence[int],
    answers: Sequence[Sequence[str | None]] | None,
) -> dict[str, Tensor]:
    """[P] fp64 of each pass@k, avg@n and maj@n, from the completions to which a reward applies.

    NaN for a prompt that has too few of these.
    """
    prompts, n = rewards.shape
    scored = ~rewards.isnan()
    names = [f"pass@{k}" for k in ks]
    if n > 1:
        names += [f"avg@{n}"] if answers is None else [f"avg@{n}", f"maj@{n}"]
    found = {
        name: torch.full((prompts,), math.nan, dtype=torch.float64, device="cpu") for name in names
    }
    counts = scored.sum(dim=1)
    for count in set(counts.tolist()) - {0}:  # prompts with equally many of them, together
        rows = (counts == count).nonzero()[:, 0]
        kept = scored[rows]
        successes = (rewards[rows] >= success_reward)[kept].view(len(rows), count)
        for k in ks:
            if k <= count or count == n:  # a k above n is refused
                found[f"pass@{k}"][rows] = pass_at_k(successes, k)
        if n > 1:
            found[f"avg@{n}"][rows] = average_at_n(successes)
        if n > 1 and answers is not None:
            chosen = [list(compress(answers[row], scored[row].tolist())) for row in rows.tolist()]
            found[f"maj@{n}"][rows] = majority_at_n(successes, chosen)
    return found


def _merge(means: _Means, key: tuple[str | None, str], mean: MeanMetric) -> None:
    """Count what `mean` has seen in the metric of this key as well."""
    if key in means:
        means[key].merge_state(mean)
    else:
        means[key] = deepcopy(mean)
