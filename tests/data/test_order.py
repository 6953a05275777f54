"""Sources are mixed by their weights, in an order that is a function of seed and position."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.data.order import drawn, interleaved, quotas, shuffled

SIZES, WEIGHTS, SEED, LENGTH = [5, 7, 30], [2.0, 1.0, 3.0], 3, 42


def source_of(position: int) -> int:
    return 0 if position < 5 else 1 if position < 12 else 2


@pytest.mark.parametrize(
    ("weights", "length", "expected"),
    [
        ([3, 1], 8, [6, 2]),
        ([2, 1], 10, [7, 3]),  # 6.67 and 3.33, one left over
        ([1, 1, 1], 10, [4, 3, 3]),  # 3.33 each, one left over
        ([0.5, 0.3, 0.2], 9, [4, 3, 2]),  # 4.5, 2.7 and 1.8
        ([1, 99], 10, [0, 10]),
    ],
)
def test_quotas_are_shares_rounded_to_the_largest_remainder(
    weights: list[float], length: int, expected: list[int]
) -> None:
    assert quotas(weights, length) == expected


def test_sources_alternate_as_evenly_as_their_quotas_allow() -> None:
    order = interleaved([3, 8], [2.0, 1.0], SEED, 0, 9)
    assert "".join("a" if position < 3 else "b" for position in order) == "abaabaaba"


def test_every_stretch_of_an_epoch_holds_the_shares() -> None:
    order = interleaved(SIZES, WEIGHTS, SEED, 0, LENGTH)
    assert len(order) == LENGTH
    for end in range(1, LENGTH + 1):
        for source, share in enumerate((14 / 42, 7 / 42, 21 / 42)):
            count = sum(source_of(position) == source for position in order[:end])
            assert abs(count - end * share) <= 1


def test_each_source_walks_through_permutations_of_its_own_across_epochs() -> None:
    epochs = [interleaved(SIZES, WEIGHTS, SEED, epoch, LENGTH) for epoch in range(5)]
    walk = [position for order in epochs for position in order if source_of(position) == 0]
    assert len(walk) == 5 * 14
    passes = [walk[i : i + 5] for i in range(0, 70, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len({tuple(one) for one in passes}) > 5


def test_orders_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = interleaved(SIZES, WEIGHTS, SEED, 2, LENGTH), drawn(SIZES, WEIGHTS, 9, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert first == (interleaved(SIZES, WEIGHTS, SEED, 2, LENGTH), drawn(SIZES, WEIGHTS, 9, SEED))
    assert first[0] != interleaved(SIZES, WEIGHTS, SEED + 1, 2, LENGTH)
    assert first[1] != drawn(SIZES, WEIGHTS, 9, SEED + 1)
    assert shuffled(30, 1, 0) != shuffled(30, 1, 1)


def test_a_draw_has_no_prompt_twice() -> None:
    assert sorted(drawn([3, 4], None, 7, seed=0)) == list(range(7))
    assert sorted(drawn([3, 4], [1.0, 9.0], 7, seed=0)) == list(range(7))


@pytest.mark.parametrize(("weights", "share"), [(None, 5 / 20), ([1.0, 1.0], 1 / 2)])
def test_single_draws_come_by_weight(weights: list[float] | None, share: float) -> None:
    draws = [drawn([5, 15], weights, 1, seed)[0] for seed in range(2000)]
    of_first = sum(position < 5 for position in draws) / 2000
    assert abs(of_first - share) < 0.05  # four and a half standard deviations
    assert len(set(draws)) == 20
