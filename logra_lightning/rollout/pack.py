"""`pack`: rollouts to microbatches that fit a budget of padded tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from logra_lightning.types import Microbatch, Rollouts


def pack(
    rollouts: Rollouts,
    max_tokens: int,
    *,
    pad_token_id: int,
    temperature: float,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Every rollout once, longest first, as many to a microbatch as the budget allows.

    Args:
        rollouts: B rollouts.
        max_tokens: padded tokens of a microbatch, B * L.
        pad_token_id: fills rows on the right; may equal a real token.
        temperature: that the rollouts were sampled with.
        device: where the microbatches go.

    Raises:
        ValueError: a rollout longer than the budget.
    """
    sizes = [
        len(prompt) + len(completion.token_ids)
        for prompt, completion in zip(rollouts.prompt_ids, rollouts.completions, strict=True)
    ]
    order = sorted(range(len(rollouts)), key=lambda i: -sizes[i])
    while order:
        longest = sizes[order[0]]
        if longest > max_tokens:
            raise ValueError(
                f"a rollout has {longest} tokens, more than a microbatch may hold: raise "
                f"model.max_tokens_per_microbatch from {max_tokens} to at least {longest}"
            )
        count = max_tokens // longest
        chosen, order = order[:count], order[count:]
        yield _microbatch(rollouts, chosen, longest, pad_token_id, temperature, device)


def _microbatch(
    rollouts: Rollouts,
    chosen: list[int],
    length: int,
    pad_token_id: int,
    temperature: float,
    device: torch.device,
) -> Microbatch:
    input_ids = torch.full((len(chosen), length), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(chosen), length, dtype=torch.bool)
    for row, i in enumerate(chosen):
        prompt, completion = rollouts.prompt_ids[i], rollouts.completions[i].token_ids
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion, dtype=torch.int64)
        mask[row, len(prompt) : end] = True
    logprobs = [rollouts.completions[i].logprobs for i in chosen]
    # In the order of the mask: row by row, as many as each row trains.
    advantages = rollouts.advantages[chosen].repeat_interleave(mask.sum(dim=1))
    return Microbatch(
        input_ids=input_ids.to(device),
        completion_mask=mask.to(device),
        rollout_logprobs=torch.cat(logprobs).to(device),
        advantages=advantages.to(device),
        temperature=temperature,
    )
