"""Packing keeps every token once, masks by length and respects the budget."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from logra_lightning.rollout import (
    minibatches,
    pack,
    packing,
    same_number_per_process,
    trained_ones,
)
from logra_lightning.types import Completion, Microbatch, Rollouts

CPU = torch.device("cpu")
EOS = 0


def rollouts(prompts: list[list[int]], completions: list[list[int]]) -> Rollouts:
    size = len(prompts)
    made = [
        Completion(ids, torch.arange(len(ids)) + 100.0 * i, truncated=False)
        for i, ids in enumerate(completions)
    ]
    return Rollouts(prompts, made, torch.zeros(size), {}, torch.arange(size) + 0.5)


def packed(batch: Rollouts, max_tokens: int) -> list[Microbatch]:
    return list(pack(batch, max_tokens, temperature=0.7, device=CPU))


def test_masks_come_from_lengths_when_padding_is_the_end_of_sequence() -> None:
    (microbatch,) = packed(rollouts([[EOS, 3], [4]], [[5, EOS], [5, 6, 7, 8]]), 100)
    assert microbatch.input_ids.tolist() == [[4, 5, 6, 7, 8], [EOS, 3, 5, EOS, EOS]]
    assert microbatch.completion_mask.tolist() == [
        [False, True, True, True, True],
        [False, False, True, True, False],
    ]
    assert microbatch.completion_ids.tolist() == [5, 6, 7, 8, 5, EOS]
    assert microbatch.rollout_logprobs.tolist() == [100, 101, 102, 103, 0, 1]
    assert microbatch.advantages.tolist() == [1.5] * 4 + [0.5] * 2
    assert microbatch.temperature == 0.7
    assert microbatch.token_weights.tolist() == pytest.approx([1 / 6] * 6)
    assert microbatch.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("max_tokens", [9, 12, 20, 1000])
def test_every_rollout_once_within_the_budget(max_tokens: int) -> None:
    completions = [[i + 1] * (i + 1) for i in range(8)]
    microbatches = packed(rollouts([[99]] * 8, completions), max_tokens)
    assert all(m.input_ids.numel() <= max_tokens for m in microbatches)
    assert sorted(t for m in microbatches for t in m.completion_ids.tolist()) == sorted(
        t for ids in completions for t in ids
    )
    # No microbatch could have taken the longest row of the next.
    for m, following in itertools.pairwise(microbatches):
        assert (m.input_ids.shape[0] + 1) * m.input_ids.shape[1] > max_tokens
        assert m.input_ids.shape[1] >= following.input_ids.shape[1]


def test_rows_are_filled_with_a_token_that_every_embedding_has() -> None:
    (microbatch,) = packed(rollouts([[3], [4]], [[5], [5, 6, 7]]), 100)
    assert microbatch.input_ids[~microbatch.completion_mask].tolist() == [4, 3, 0, 0]


def test_a_rollout_longer_than_the_budget_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch from 4 to at least 5"):
        packed(rollouts([[1, 2]], [[3, 4, 5]]), 4)


def test_values_of_tokens_follow_their_rollouts() -> None:
    batch = rollouts([[1]] * 3, [[5], [6, 7, 8], [9, 9]])
    old = [torch.full((len(c.token_ids),), float(i)) for i, c in enumerate(batch.completions)]
    batch = replace(batch, old_logprobs=old, reference_logprobs=[-x for x in old])
    weights = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    (microbatch,) = pack(batch, 100, temperature=1.0, device=CPU, token_weights=weights)
    assert list(microbatch.rollouts) == [1, 2, 0]
    assert microbatch.old_logprobs is not None
    assert microbatch.reference_logprobs is not None
    assert microbatch.old_logprobs.tolist() == [1, 1, 1, 2, 2, 0]
    assert microbatch.reference_logprobs.tolist() == [-1, -1, -1, -2, -2, 0]
    assert microbatch.token_weights.tolist() == pytest.approx([0.2] * 3 + [0.3] * 2 + [0.1])
    means = microbatch.rollout_mean(torch.tensor([1.0, 2.0, 6.0, 1.0, 2.0, 7.0]))
    assert means.tolist() == [3, 3, 3, 1.5, 1.5, 7]


def test_tokens_without_a_finite_logprob_are_read_but_not_trained() -> None:
    batch = rollouts([[1]] * 3, [[5, 6], [7, 8, 9], [3, 4]])
    batch.completions[1].logprobs[1] = torch.nan
    batch.completions[2].logprobs[:] = torch.inf
    (microbatch,) = packed(batch, 100)
    assert microbatch.input_ids.tolist() == [[1, 7, 8, 9], [1, 5, 6, EOS]]
    assert microbatch.completion_ids.tolist() == [7, 9, 5, 6]
    assert microbatch.rollout_logprobs.tolist() == [100, 102, 0, 1]
    assert microbatch.advantages.tolist() == [1.5, 1.5, 0.5, 0.5]
    assert microbatch.token_weights.tolist() == [0.25] * 4
    assert microbatch.num_completion_tokens == 4
    assert list(microbatch.rollouts) == [1, 0]


def test_rollouts_with_nothing_to_train_are_left_out() -> None:
    batch = rollouts([[1]] * 3, [[5], [6], [7]])
    assert trained_ones(batch, mask_truncated=True) is batch
    batch.completions[0].logprobs[:] = torch.nan
    batch = replace(batch, completions=[*batch.completions[:2], Completion([7], [-1.0], True)])  # type: ignore[arg-type]
    assert trained_ones(batch, mask_truncated=False).advantages.tolist() == [1.5, 2.5]
    assert trained_ones(batch, mask_truncated=True).advantages.tolist() == [1.5]


def test_nothing_to_train_makes_no_microbatch() -> None:
    assert packed(rollouts([[1]], [[5]]).select([]), 100) == []


@pytest.mark.parametrize("own", [1, 0])
def test_a_process_with_fewer_microbatches_makes_empty_ones(
    own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has 3 microbatches of a step of 12 tokens."""
    monkeypatch.setattr(packing, "of_all_processes", lambda value: [value, (3, 12)])
    batch = replace(rollouts([[1]] * own, [[5, 6]] * own), step_tokens=12)
    made = list(same_number_per_process(packed(batch, 100), CPU))
    assert [len(m.rollouts) for m in made] == [1] * own + [0] * (3 - own)
    for m in made[own:]:
        assert m.input_ids.shape == (1, 2)
        assert m.completion_ids.tolist() == m.advantages.tolist() == []
        assert m.old_logprobs is not None
        assert m.reference_logprobs is not None
        assert m.num_completion_tokens == 12


def test_one_process_makes_no_empty_microbatch() -> None:
    made = packed(rollouts([[1]] * 2, [[5], [6, 7]]), 3)
    assert list(same_number_per_process(made, CPU)) == made
    assert list(same_number_per_process([], CPU)) == []


def test_minibatches_are_whole_groups_and_every_rollout_comes_once() -> None:
    batch = rollouts([[i] for i in range(12)], [[i + 1] for i in range(12)])
    parts = minibatches(batch, 2, 3, seed=1)
    ids = [[c.token_ids[0] - 1 for c in part.completions] for part in parts]
    assert sorted(i for part in ids for i in part) == list(range(12))
    for part in ids:
        assert len(part) == 4
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(part[::2], part[1::2], strict=True))
    assert ids == [
        [c.token_ids[0] - 1 for c in part.completions] for part in minibatches(batch, 2, 3, seed=1)
    ]
    assert any(
        [c.token_ids for c in a.completions] != [c.token_ids for c in b.completions]
        for a, b in zip(parts, minibatches(batch, 2, 3, seed=2), strict=True)
    )


def test_the_minibatches_of_two_processes_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 groups in the first process and 2 in the other, after some were dropped."""
    batch = rollouts([[i] for i in range(14)], [[i + 1] for i in range(14)])
    alone = [part.prompt_ids for part in minibatches(batch, 2, 3, seed=5)]
    together: list[list[list[int]]] = [[], [], []]
    for process, own in enumerate((range(10), range(10, 14))):
        monkeypatch.setattr(packing, "of_all_processes", lambda _: [5, 2])
        monkeypatch.setattr(packing, "process_index", lambda process=process: process)
        for part, found in zip(together, minibatches(batch.select(own), 2, 3, seed=5), strict=True):
            part += found.prompt_ids
    assert [sorted(part) for part in together] == [sorted(part) for part in alone]
    assert [len(part) for part in together] == [6, 4, 4]


def test_what_no_reward_applies_to_is_not_trained_nor_what_is_cut_off_where_that_is_masked() -> (
    None
):
    batch = rollouts([[i] for i in range(4)], [[5]] * 4)
    cut = [Completion([5], torch.zeros(1), truncated=i == 3) for i in range(4)]
    rewards = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    batch = replace(batch, completions=cut, rewards=rewards)
    assert list(trained_ones(batch, mask_truncated=False).prompt_ids) == [[0], [2], [3]]
    assert list(trained_ones(batch, mask_truncated=True).prompt_ids) == [[0], [2]]


def test_fewer_groups_than_minibatches_leave_some_empty() -> None:
    batch = rollouts([[0]] * 4, [[1]] * 4)
    assert minibatches(batch, 2, 1, seed=0) == [batch]
    assert [len(part) for part in minibatches(batch, 2, 3, seed=0)] == [2, 2, 0]


def test_the_step_of_all_ranks_is_the_denominator() -> None:
    batch = replace(rollouts([[1]] * 2, [[5], [6, 7]]), step_tokens=12)
    (microbatch,) = packed(batch, 100)
    assert microbatch.token_weights.tolist() == pytest.approx([1 / 12] * 3)
    assert microbatch.num_completion_tokens == 12


def test_rollouts_without_the_counts_of_a_step_are_the_whole_step() -> None:
    batch = rollouts([[1]] * 2, [[5], [6, 7]])
    assert (batch.step_tokens, batch.step_rollouts) == (None, None)
    (microbatch,) = packed(batch, 100)
    assert microbatch.token_weights.tolist() == pytest.approx([1 / 3] * 3)
    assert microbatch.num_completion_tokens == 3
