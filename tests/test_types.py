"""Records refuse what does not fit together where they are made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from logra_lightning.types import (
    Completion,
    Microbatch,
    PromptBatch,
    Rollouts,
    SamplingParams,
    evenly_spaced,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -0.1}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be 0"),
    ],
)
def test_sampling_params_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_prompt_batch_checks_its_columns() -> None:
    batch = PromptBatch([[1], [2, 3]], {"answer": ["a", "b"]}, [4, 5])
    assert len(batch) == 2
    assert batch.to(torch.device("cpu")) is batch
    with pytest.raises(ValueError, match="column 'answer' has 1 values for 2 prompts"):
        PromptBatch([[1], [2]], {"answer": ["a"]})
    with pytest.raises(ValueError, match="the prompt of row 7 has no tokens"):
        PromptBatch([[1], []], rows=[6, 7])


def test_completion_needs_a_logprob_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens and logprobs of shape"):
        Completion([1, 2], torch.zeros(1), truncated=False)
    with pytest.raises(ValueError, match="at least one token"):
        Completion([], torch.zeros(0), truncated=False)


def test_a_token_without_a_finite_logprob_is_not_trained() -> None:
    listed = Completion([1, 2, 3], [-1.0, None, -math.inf], truncated=False)  # type: ignore[arg-type]
    assert listed.logprobs.dtype == torch.float32
    assert listed.trained.tolist() == [True, False, False]
    unknown = Completion([1, 2], None, truncated=False)  # type: ignore[arg-type]
    assert unknown.trained.tolist() == [False, False]
    zeros = torch.zeros(2)
    both = Rollouts([[1], [1]], [listed, unknown], zeros, {}, zeros)
    assert both.lengths.tolist() == [3, 2]
    assert both.trained_lengths.tolist() == [1, 0]
    assert both.num_completion_tokens == 1


def rollouts(advantages: torch.Tensor) -> Rollouts:
    completion = Completion([1, 2], torch.zeros(2), truncated=True)
    return Rollouts([[1], [1]], [completion] * 2, torch.zeros(2), {}, advantages)


def test_rollouts_check_shapes_and_finiteness() -> None:
    assert rollouts(torch.zeros(2)).lengths.tolist() == [2, 2]
    assert rollouts(torch.zeros(2)).truncated.all()
    with pytest.raises(ValueError, match=r"advantages must have shape \[2\], got \[3\]"):
        rollouts(torch.zeros(3))
    with pytest.raises(ValueError, match="advantages are not finite"):
        rollouts(torch.tensor([0.0, float("nan")]))


def test_microbatch_needs_one_shape_and_a_temperature() -> None:
    ids, none = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(0)
    with pytest.raises(ValueError, match="must have the same shape"):
        Microbatch(ids, torch.zeros(2, 2, dtype=torch.bool), none, none, 1.0, none, 1)
    with pytest.raises(ValueError, match="temperature must be positive"):
        Microbatch(ids, torch.zeros(2, 3, dtype=torch.bool), none, none, 0.0, none, 1)


def rollouts_of(sizes: list[tuple[int, int]]) -> Rollouts:
    """One rollout for each pair of prompt and completion length."""
    values = torch.arange(float(len(sizes)))
    completions = [
        Completion(list(range(n)), torch.arange(float(n)), truncated=False) for _, n in sizes
    ]
    return Rollouts([[7] * p for p, _ in sizes], completions, values, {"a": values}, values)


def test_spread_takes_rollouts_from_the_whole_batch() -> None:
    whole = rollouts_of([(1, i + 1) for i in range(10)])
    few = whole.spread(4)
    assert few.lengths.tolist() == [1, 3, 6, 8]
    assert few.rewards.tolist() == few.rewards_by_name["a"].tolist() == [0, 2, 5, 7]
    assert len(whole.spread(10)) == len(whole.spread(11)) == 10


def test_evenly_spaced_positions_start_at_the_first_and_never_repeat() -> None:
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(3, 8) == [0, 1, 2]
    assert evenly_spaced(3, 0) == evenly_spaced(0, 3) == []


def test_select_takes_everything_along_in_the_order_asked_for() -> None:
    whole = rollouts_of([(i + 1, i + 1) for i in range(4)])
    old = [torch.full((i + 1,), float(i)) for i in range(4)]
    whole = replace(whole, rows=[10, 11, 12, 13], old_logprobs=old)
    some = whole.select([3, 1])
    assert some.rows == [13, 11]
    assert some.rewards.tolist() == some.advantages.tolist() == [3, 1]
    assert [len(ids) for ids in some.prompt_ids] == some.lengths.tolist() == [4, 2]
    assert some.num_completion_tokens == 6
    assert some.old_logprobs is not None
    assert [x.tolist() for x in some.old_logprobs] == [[3] * 4, [1] * 2]
    assert some.reference_logprobs is None
    assert whole.select([]).num_completion_tokens == len(whole.select([])) == 0


def test_cut_leaves_the_prompt_and_at_least_one_token() -> None:
    cut = rollouts_of([(3, 5), (3, 2), (9, 4)]).cut(6)
    assert cut.lengths.tolist() == [3, 2, 1]
    assert cut.truncated.tolist() == [True, False, True]
    assert cut.completions[0].logprobs.tolist() == [0, 1, 2]
    assert [len(ids) for ids in cut.prompt_ids] == [3, 3, 9]
