"""Cuts the rollouts of a batch: `minibatches` into optimizer steps, `pack` into microbatches.

Between the two, `trained` leaves out what is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from logra_lightning.distributed.processes import of_all_processes, process_index
from logra_lightning.types import Microbatch, Rollouts


def pack(
    rollouts: Rollouts,
    max_tokens: int,
    *,
    temperature: float,
    device: torch.device,
    token_weights: Tensor | None = None,
) -> Iterator[Microbatch]:
    """Cut rollouts into microbatches, each with as many of the rollouts as the budget allows.

    The longest rollouts come first, each rollout comes once; one without any trained token is left
    out. With a budget of 12, rollouts of
    [5, 5, 5] tokens become the microbatches [[5, 5], [5]]. Rollouts of [2, 6, 4] tokens become
    [[6, 4], [2]]: the one of 4 is padded to 6, so the first microbatch has 12 tokens and is full.

    Args:
        rollouts: B rollouts.
        max_tokens: budget of a microbatch in tokens, padding included: rows times the longest row.
        temperature: temperature that the rollouts were sampled with.
        device: device that the microbatches are put on.
        token_weights: [B] fp64, how much each token of a rollout counts in the loss; when left out,
            the loss is the mean over all tokens of the step.

    Returns:
        An iterator over the microbatches; each is made when it is asked for.

    Raises:
        ValueError: a rollout is longer than the budget.
    """
    tokens, _ = rollouts.step_counts
    if token_weights is None:
        token_weights = torch.full((len(rollouts),), 1 / max(tokens, 1), dtype=torch.float64)
    weights = token_weights.to(torch.float32)
    if weights.shape != (len(rollouts),):
        raise ValueError(
            f"a normalizer (model.objective.normalizer) must return one weight for each of "
            f"{len(rollouts)} rollouts, got shape {list(weights.shape)}"
        )
    sizes = rollouts.sizes
    order = [i for i, completion in enumerate(rollouts.completions) if completion.trained.any()]
    order.sort(key=lambda i: -sizes[i])
    engine_logprobs = [c.logprobs[c.trained] for c in rollouts.completions]
    while order:
        longest = sizes[order[0]]
        if longest > max_tokens:
            raise ValueError(
                f"a rollout has {longest} tokens, more than a microbatch may hold: raise "
                f"model.memory.max_tokens_per_microbatch from {max_tokens} to at least {longest}"
            )
        count = max_tokens // longest
        chosen, order = order[:count], order[count:]
        input_ids, mask = _padded(rollouts, chosen, longest)
        lengths = mask.sum(dim=1)  # values of tokens stand one after the other, row by row
        yield Microbatch(
            input_ids=input_ids.to(device),
            completion_mask=mask.to(device),
            rollout_logprobs=_tokens(engine_logprobs, chosen, device),
            advantages=rollouts.advantages[chosen].repeat_interleave(lengths).to(device),
            temperature=temperature,
            token_weights=weights[chosen].repeat_interleave(lengths).to(device),
            num_completion_tokens=tokens,
            rollouts=chosen,
            old_logprobs=_tokens_if_any(rollouts.old_logprobs, chosen, device),
            reference_logprobs=_tokens_if_any(rollouts.reference_logprobs, chosen, device),
        )


def same_number_per_process(
    microbatches: Iterable[Microbatch], device: torch.device
) -> Iterator[Microbatch]:
    """Add empty microbatches where another process has more; every process must call it.

    If one process has 3 microbatches and another 1, the second one gets 2 empty ones. Processes
    that share the weights (FSDP) need this, because they run their forward passes together. An
    empty microbatch has one row of two tokens, none of which is trained, and no rollout.

    Args:
        microbatches: the microbatches of this process.
        device: device that the empty ones are put on.
    """
    own = list(microbatches)
    everywhere = of_all_processes((len(own), own[0].num_completion_tokens if own else 0))
    sizes, tokens_of_step = zip(*everywhere, strict=True)
    none = torch.zeros(0, dtype=torch.float32, device=device)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    empty = Microbatch(
        input_ids=tokens,
        completion_mask=torch.zeros_like(tokens, dtype=torch.bool),
        rollout_logprobs=none,
        advantages=none,
        temperature=1.0,
        token_weights=none,
        num_completion_tokens=max(tokens_of_step),
        old_logprobs=none,
        reference_logprobs=none,
    )
    return iter(own + [empty] * (max(sizes) - len(own)))


def minibatches(rollouts: Rollouts, group_size: int, count: int, *, seed: int) -> list[Rollouts]:
    """Share out the groups of a batch among `count` optimizer steps, in an order drawn from `seed`.

    The 6 groups [0, 1, 2, 3, 4, 5] in 3 parts become, for instance, [[4, 2], [0, 1], [5, 3]]. Where
    there are fewer groups than parts, some parts are empty. A single part keeps the order.

    The groups of all processes are shared out together, those of process 0 first, so the steps are
    the same however many processes have sampled them. If two processes have groups [0, 1, 2] and
    [3, 4, 5], process 0 gets [[2], [0, 1], []] in this example, and process 1 [[4], [], [5, 3]].
    Every process must call it, with the same `count` and `seed`.

    Args:
        rollouts: B = P * G rollouts of this process, in which those of one prompt stand together.
        group_size: G, the number of completions per prompt; a group is never cut.
        count: number of parts.
        seed: what the order depends on.

    Returns:
        `count` parts of the rollouts of this process.
    """
    if count == 1:
        return [rollouts]
    sizes = of_all_processes(len(rollouts) // group_size)
    first = sum(sizes[: process_index()])
    own = range(first, first + sizes[process_index()])
    generator = torch.Generator(device="cpu").manual_seed(seed)
    order = torch.randperm(sum(sizes), generator=generator).tolist()
    parts = [[group - first for group in order[i::count] if group in own] for i in range(count)]
    return [
        rollouts.select([g * group_size + i for g in part for i in range(group_size)])
        for part in parts
    ]


def trained_ones(rollouts: Rollouts, *, mask_truncated: bool) -> Rollouts:
    """Leave out the rollouts that are not trained on.

    That is those to which no reward applies, those without a token to train and, with
    `mask_truncated`, those that were cut off.
    """
    keep = ~rollouts.rewards.isnan() & (rollouts.trained_lengths > 0)
    if mask_truncated:
        keep &= ~rollouts.truncated
    return rollouts if keep.all() else rollouts.select(keep.nonzero()[:, 0].tolist())


def _tokens(parts: Sequence[Tensor], chosen: Sequence[int], device: torch.device) -> Tensor:
    """[T] values of the tokens of the chosen rollouts, one rollout after the other."""
    return torch.cat([parts[i] for i in chosen]).to(device)


def _tokens_if_any(
    parts: Sequence[Tensor] | None, chosen: Sequence[int], device: torch.device
) -> Tensor | None:
    return None if parts is None else _tokens(parts, chosen, device)


def _padded(rollouts: Rollouts, chosen: list[int], length: int) -> tuple[Tensor, Tensor]:
    """[b, L] token ids of the chosen rollouts, and [b, L] bool, True for trained ones."""
    # Filled with token 0, which every embedding has; a tokenizer's padding token may lie beyond it.
    input_ids = torch.zeros(len(chosen), length, dtype=torch.int64)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, i in enumerate(chosen):
        prompt, completion = rollouts.prompt_ids[i], rollouts.completions[i]
        end = len(prompt) + len(completion.token_ids)
        input_ids[row, :end] = torch.tensor(prompt + completion.token_ids, dtype=torch.int64)
        mask[row, len(prompt) : end] = completion.trained
    return input_ids, mask
