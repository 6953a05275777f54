"""Weights of tokens against the three means written out, and their independence of the cut."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.objective import ConstantLength, Normalizer, SequenceMean, TokenMean

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]
LOSSES = [[0.3 * i + 0.01 * j * j for j in range(n)] for i, n in enumerate(LENGTHS)]
EVERY = [TokenMean(), SequenceMean(), ConstantLength(8)]


def weighted(normalizer: Normalizer, chosen: range) -> float:
    weights = normalizer(
        torch.tensor([LENGTHS[i] for i in chosen]), num_tokens=sum(LENGTHS), num_rollouts=8
    )
    assert weights.dtype == torch.float64
    return sum(w * sum(LOSSES[i]) for w, i in zip(weights.tolist(), chosen, strict=True))


def test_token_mean_is_the_mean_over_all_tokens() -> None:
    flat = [loss for row in LOSSES for loss in row]
    assert weighted(TokenMean(), range(8)) == pytest.approx(sum(flat) / len(flat))


def test_sequence_mean_is_the_mean_of_the_rollouts_means() -> None:
    means = [sum(row) / len(row) for row in LOSSES]
    assert weighted(SequenceMean(), range(8)) == pytest.approx(sum(means) / 8)


def test_constant_length_divides_each_rollouts_sum_by_the_same_number() -> None:
    sums = [sum(row) for row in LOSSES]
    assert weighted(ConstantLength(8), range(8)) == pytest.approx(sum(sums) / 8 / 8)


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_cut_into_microbatches_changes_nothing(normalizer: Normalizer, size: int) -> None:
    parts = [weighted(normalizer, range(i, i + size)) for i in range(0, 8, size)]
    assert sum(parts) == pytest.approx(weighted(normalizer, range(8)), rel=1e-12)


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: type(n).__name__)
def test_a_step_in_which_everything_is_masked_has_no_weights(normalizer: Normalizer) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert normalizer(empty, num_tokens=0, num_rollouts=0).shape == (0,)


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="length must be at least 1"):
        ConstantLength(0)
