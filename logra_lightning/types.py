"""The records that travel from the data to the loss, checked where they are made.

`PromptBatch` comes from a dataloader, `Rollouts` from an engine and the rewards, `Microbatch` from
`rollout.pack`. Shape letters: P prompts, G completions per prompt, B = P * G rollouts, L padded
tokens, T completion tokens of a microbatch, one after the other.
"""

from __future__ import annotations

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
        columns: column name to P values, as the data set holds them; rewards ask for them by name.
        rows: P row numbers in the data set; -1 where there is none.

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
        token_ids: n token ids, with the end-of-sequence token where it was drawn.
        logprobs: [n] fp32, nats, under the distribution that was sampled from.
        truncated: whether the completion was cut off by `max_tokens`.
    """

    token_ids: list[int]
    logprobs: Tensor
    truncated: bool

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0 or self.logprobs.shape != (len(self.token_ids),):
            raise ValueError(
                f"a completion needs at least one token and a logprob for each, got "
                f"{len(self.token_ids)} tokens and logprobs of shape {tuple(self.logprobs.shape)}"
            )


@dataclass(frozen=True)
class Rollouts:
    """The B = P * G rollouts of one batch; those of one prompt stand together.

    Args:
        prompt_ids: B lists of token ids.
        completions: B completions.
        rewards: [B] fp32, weighted sum.
        rewards_by_name: name to [B] fp32, before weights; NaN where a reward does not apply.
        advantages: [B] fp32.
        num_completion_tokens: completion tokens of the whole optimizer step over all ranks, the
            loss normalizer.
    """

    prompt_ids: Sequence[list[int]]
    completions: Sequence[Completion]
    rewards: Tensor
    rewards_by_name: dict[str, Tensor]
    advantages: Tensor
    num_completion_tokens: int

    def __post_init__(self) -> None:
        size = len(self.prompt_ids)
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

    def spread(self, count: int) -> Rollouts:
        """`count` of the rollouts, evenly spaced; all where there are fewer."""
        size = len(self)
        rows = [i * size // count for i in range(count)] if count < size else list(range(size))
        index = torch.tensor(rows, dtype=torch.int64, device=self.rewards.device)
        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            rewards=self.rewards[index],
            rewards_by_name={name: r[index] for name, r in self.rewards_by_name.items()},
            advantages=self.advantages[index],
        )

    def cut(self, max_tokens: int) -> Rollouts:
        """Completions cut off where prompt and completion reach `max_tokens`; one token stays."""
        completions = []
        for prompt, completion in zip(self.prompt_ids, self.completions, strict=True):
            keep = max(1, max_tokens - len(prompt))
            completions.append(
                completion
                if keep >= len(completion.token_ids)
                else Completion(completion.token_ids[:keep], completion.logprobs[:keep], True)
            )
        return replace(self, completions=completions)

    @property
    def lengths(self) -> Tensor:
        """[B] int64, completion tokens of each rollout."""
        return torch.tensor([len(c.token_ids) for c in self.completions], dtype=torch.int64)

    @property
    def truncated(self) -> Tensor:
        """[B] bool, whether each completion was cut off."""
        return torch.tensor([c.truncated for c in self.completions], dtype=torch.bool)


@dataclass(frozen=True)
class Microbatch:
    """Rollouts for one forward and backward pass, padded on the right.

    Padding on the right of a causal model changes nothing to its left, so no attention mask is
    needed and none is guessed from token values: a padding token may equal the end of sequence.

    Args:
        input_ids: [B, L] int64, prompt then completion then padding.
        completion_mask: [B, L] bool, true where a token is trained.
        rollout_logprobs: [T] fp32, nats, of the tokens where `completion_mask`, row by row.
        advantages: [T] fp32, of the same tokens.
        temperature: that the tokens were sampled with; divides the policy's logits too.
    """

    input_ids: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    temperature: float

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.completion_mask.shape:
            raise ValueError(
                f"input_ids {list(self.input_ids.shape)} and completion_mask "
                f"{list(self.completion_mask.shape)} must have the same shape"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive for training, got {self.temperature}")

    @property
    def target_ids(self) -> Tensor:
        """[T] int64, the trained tokens."""
        return self.input_ids[self.completion_mask]
