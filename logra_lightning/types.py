"""The records that travel from the data to the loss, checked where they are made.

`PromptBatch` comes from a dataloader, `Rollouts` from an engine and the rewards, `Microbatch` from
`rollout.pack`. Shape letters: P prompts, G completions per prompt, B = P * G rollouts, L tokens of
a padded row, T completion tokens of a microbatch, in one row after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Args:
        max_tokens: longest completion, in tokens, the end-of-sequence token included.
        temperature: divides the logits; 0 takes the likeliest token (evaluation only).
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many likeliest tokens; 0 keeps all.

    Raises:
        ValueError: a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")


@dataclass
class PromptBatch:
    """P prompts and the other columns of their rows.

    Args:
        prompt_ids: P lists of token ids, none empty.
        columns: name of each column of the data set to its P values; rewards ask for them by name.
        rows: P row numbers in the data set; -1 for a prompt that comes from no data set.

    Raises:
        ValueError: an empty prompt or a column of another length.
    """

    prompt_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rows:
            self.rows = [-1] * len(self.prompt_ids)
        for row, ids in zip(self.rows, self.prompt_ids, strict=True):
            if len(ids) == 0:
                raise ValueError(f"the prompt of row {row} has no tokens")
        for name, values in self.columns.items():
            if len(values) != len(self.prompt_ids):
                raise ValueError(
                    f"column {name!r} has {len(values)} values for {len(self.prompt_ids)} prompts"
                )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def to(self, *args: Any, **kwargs: Any) -> PromptBatch:
        """Itself: there are no tensors to move. Lightning calls this for every batch."""
        return self


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one prompt.

    Args:
        token_ids: n token ids; the last one is the end-of-sequence token if that was drawn.
        logprobs: [n] fp32, nats, the logprob of each token under the distribution that it was
            sampled from. A token whose logprob is not finite does not train. A list is taken too,
            with None for a token without a logprob, and None where no token has one.
        truncated: whether the completion was cut off by `max_tokens`.

    Raises:
        ValueError: no token, or another number of logprobs.
    """

    token_ids: list[int]
    logprobs: Tensor
    truncated: bool

    def __post_init__(self) -> None:
        given: Any = self.logprobs
        if not isinstance(given, Tensor):
            found = [None] * len(self.token_ids) if given is None else given
            values = [math.nan if value is None else float(value) for value in found]
            made = torch.tensor(values, dtype=torch.float32, device="cpu")
            object.__setattr__(self, "logprobs", made)
        if len(self.token_ids) == 0 or self.logprobs.shape != (len(self.token_ids),):
            raise ValueError(
                f"a completion needs at least one token and a logprob for each, got "
                f"{len(self.token_ids)} tokens and logprobs of shape {tuple(self.logprobs.shape)}"
            )

    @property
    def trained(self) -> Tensor:
        """[n] bool, True where the logprob is finite: the tokens that can be trained."""
        return self.logprobs.isfinite()


@dataclass(frozen=True)
class Rollouts:
    """The B = P * G rollouts of one batch; those of one prompt stand together.

    Args:
        prompt_ids: B lists of token ids.
        completions: B completions.
        rewards: [B] fp32, the weighted sum of all rewards; NaN where none applies.
        rewards_by_name: name of each reward to [B] fp32, before its weight; NaN where the reward
            does not apply.
        advantages: [B] fp32.
        rows: B row numbers in the data set; -1 where there is none.
        metrics: tag to value, what is logged about the rollouts that were sampled.
        old_logprobs: B tensors of fp32, nats, the logprobs of each completion's trained tokens
            under the policy as it was when the batch began; None where that is this step's policy.
        reference_logprobs: the same under the frozen reference; None without a reference.
        step_tokens: tokens that all processes together train in the optimizer step; None where
            these rollouts are the whole step.
        step_rollouts: rollouts that all processes together train in the optimizer step; None where
            these are all of them.
    """

    prompt_ids: Sequence[list[int]]
    completions: Sequence[Completion]
    rewards: Tensor
    rewards_by_name: dict[str, Tensor]
    advantages: Tensor
    rows: Sequence[int] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    old_logprobs: Sequence[Tensor] | None = None
    reference_logprobs: Sequence[Tensor] | None = None
    step_tokens: int | None = None
    step_rollouts: int | None = None

    def __post_init__(self) -> None:
        size = len(self.prompt_ids)
        if not self.rows:
            object.__setattr__(self, "rows", [-1] * size)
        if len(self.completions) != size:
            raise ValueError(f"{len(self.completions)} completions for {size} prompts")
        fields = {"rewards": self.rewards, "advantages": self.advantages, **self.rewards_by_name}
        for name, values in fields.items():
            if values.shape != (size,):
                raise ValueError(f"{name} must have shape [{size}], got {list(values.shape)}")
        if not torch.isfinite(self.advantages).all():
            raise ValueError("advantages are not finite")

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, chosen: Sequence[int]) -> Rollouts:
        """The rollouts at these positions, in this order."""
        index = torch.tensor(chosen, dtype=torch.int64, device=self.rewards.device)

        def of(values: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
            return None if values is None else [values[i] for i in chosen]

        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in chosen],
            completions=[self.completions[i] for i in chosen],
            rewards=self.rewards[index],
            rewards_by_name={name: r[index] for name, r in self.rewards_by_name.items()},
            advantages=self.advantages[index],
            rows=[self.rows[i] for i in chosen],
            old_logprobs=of(self.old_logprobs),
            reference_logprobs=of(self.reference_logprobs),
        )

    def spread(self, count: int) -> Rollouts:
        """Pick `count` rollouts, evenly spaced; all of them where there are fewer.

        Of 10 rollouts and `count` 4 it picks the positions [0, 2, 5, 7].
        """
        return self if count >= len(self) else self.select(evenly_spaced(len(self), count))

    def cut(self, max_tokens: int) -> Rollouts:
        """Cut completions off where prompt and completion reach `max_tokens`; one token stays.

        With `max_tokens` 6, a prompt of 3 and a completion of 5 tokens keep 3 and 3.
        """
        completions = []
        for prompt, completion in zip(self.prompt_ids, self.completions, strict=True):
            keep = max(1, max_tokens - len(prompt))
            completions.append(
                completion
                if keep >= len(completion.token_ids)
                else Completion(completion.token_ids[:keep], completion.logprobs[:keep], True)
            )
        return replace(self, completions=completions, old_logprobs=None, reference_logprobs=None)

    @property
    def lengths(self) -> Tensor:
        """[B] int64, the number of completion tokens of each rollout."""
        return torch.tensor([len(c.token_ids) for c in self.completions], dtype=torch.int64)

    @property
    def trained_lengths(self) -> Tensor:
        """[B] int64, the number of tokens of each rollout that are trained."""
        return torch.tensor([int(c.trained.sum()) for c in self.completions], dtype=torch.int64)

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each rollout, prompt and completion together."""
        return [
            len(prompt) + len(completion.token_ids)
            for prompt, completion in zip(self.prompt_ids, self.completions, strict=True)
        ]

    @property
    def num_completion_tokens(self) -> int:
        """The number of trained tokens of all rollouts together."""
        return int(self.trained_lengths.sum())

    @property
    def step_counts(self) -> tuple[int, int]:
        """Trained tokens and rollouts of the whole optimizer step, over all processes."""
        return (
            self.num_completion_tokens if self.step_tokens is None else self.step_tokens,
            len(self) if self.step_rollouts is None else self.step_rollouts,
        )

    @property
    def truncated(self) -> Tensor:
        """[B] bool, whether each completion was cut off."""
        return torch.tensor([c.truncated for c in self.completions], dtype=torch.bool)


@dataclass(frozen=True)
class Microbatch:
    """Rollouts for one forward and backward pass, padded on the right.

    In a causal model, padding on the right changes nothing to its left. So there is no attention
    mask, and none is guessed from token values: rows are filled with token 0, whatever it means.

    Two rollouts, [4 | 5 6 7] and [3 2 | 5] (prompt | completion), become `input_ids`
    [[4, 5, 6, 7], [3, 2, 5, 0]] and `completion_mask` [[0, 1, 1, 1], [0, 0, 1, 0]], so T is 4.

    Args:
        input_ids: [B, L] int64, prompt then completion then padding.
        completion_mask: [B, L] bool, true where a token is trained.
        rollout_logprobs: [T] fp32, nats, the engine's logprobs of the tokens where
            `completion_mask` is true, row by row.
        advantages: [T] fp32, the advantage of each of these tokens.
        temperature: the sampling temperature, which divides the policy's logits too.
        token_weights: [T] fp32, the weight of each token in the loss; where the loss is a mean,
            they add up to 1 over all microbatches and processes of a step.
        num_completion_tokens: trained tokens of the whole step over all processes.
        rollouts: position of each of its B rollouts in the batch.
        old_logprobs: [T] fp32, nats, under the policy when the batch began; None where that is the
            policy of this step.
        reference_logprobs: [T] fp32, nats, under the frozen reference; None without one.
    """

    input_ids: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    temperature: float
    token_weights: Tensor
    num_completion_tokens: int
    rollouts: Sequence[int] = ()
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.completion_mask.shape:
            raise ValueError(
                f"input_ids {list(self.input_ids.shape)} and completion_mask "
                f"{list(self.completion_mask.shape)} must have the same shape"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive for training, got {self.temperature}")

    @property
    def completion_ids(self) -> Tensor:
        """[T] int64, the ids of the trained tokens."""
        return self.input_ids[self.completion_mask]

    @property
    def lengths(self) -> Tensor:
        """[B] int64, the number of trained tokens of each rollout."""
        return self.completion_mask.sum(dim=1)

    def rollout_mean(self, values: Tensor) -> Tensor:
        """Give each token the mean over its rollout: [T] values to [T]."""
        lengths = self.lengths
        parts = values.split(lengths.tolist())
        return torch.stack([part.mean() for part in parts]).repeat_interleave(lengths)


def evenly_spaced(size: int, count: int) -> list[int]:
    """Positions of `count` items spread evenly over `size`: 4 of 10 are [0, 2, 5, 7].

    All positions where `size` is smaller than `count`.
    """
    count = min(count, size)
    return [i * size // count for i in range(count)]
