"""Packing keeps every token once, masks by length and respects the budget (cases 11 and 13)."""

from __future__ import annotations

import itertools

import pytest
import torch

from logra_lightning.rollout import pack
from logra_lightning.types import Completion, Microbatch, Rollouts

CPU = torch.device("cpu")
EOS = 0


def rollouts(prompts: list[list[int]], completions: list[list[int]]) -> Rollouts:
    size = len(prompts)
    made = [
        Completion(ids, torch.arange(len(ids)) + 100.0 * i, truncated=False)
        for i, ids in enumerate(completions)
    ]
    return Rollouts(
        prompts, made, torch.zeros(size), {}, torch.arange(size) + 0.5, sum(map(len, completions))
    )


def packed(batch: Rollouts, max_tokens: int) -> list[Microbatch]:
    return list(pack(batch, max_tokens, pad_token_id=EOS, temperature=0.7, device=CPU))


def test_masks_come_from_lengths_when_padding_is_the_end_of_sequence() -> None:
    (microbatch,) = packed(rollouts([[EOS, 3], [4]], [[5, EOS], [5, 6, 7, 8]]), 100)
    assert microbatch.input_ids.tolist() == [[4, 5, 6, 7, 8], [EOS, 3, 5, EOS, EOS]]
    assert microbatch.completion_mask.tolist() == [
        [False, True, True, True, True],
        [False, False, True, True, False],
    ]
    assert microbatch.target_ids.tolist() == [5, 6, 7, 8, 5, EOS]
    assert microbatch.rollout_logprobs.tolist() == [100, 101, 102, 103, 0, 1]
    assert microbatch.advantages.tolist() == [1.5] * 4 + [0.5] * 2
    assert microbatch.temperature == 0.7


@pytest.mark.parametrize("max_tokens", [9, 12, 20, 1000])
def test_every_rollout_once_within_the_budget(max_tokens: int) -> None:
    completions = [[i + 1] * (i + 1) for i in range(8)]
    microbatches = packed(rollouts([[99]] * 8, completions), max_tokens)
    assert all(m.input_ids.numel() <= max_tokens for m in microbatches)
    assert sorted(t for m in microbatches for t in m.target_ids.tolist()) == sorted(
        t for ids in completions for t in ids
    )
    # No microbatch could have taken the longest row of the next.
    for m, following in itertools.pairwise(microbatches):
        assert (m.input_ids.shape[0] + 1) * m.input_ids.shape[1] > max_tokens
        assert m.input_ids.shape[1] >= following.input_ids.shape[1]


def test_a_rollout_longer_than_the_budget_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch from 4 to at least 5"):
        packed(rollouts([[1, 2]], [[3, 4, 5]]), 4)
