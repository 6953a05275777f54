"""The order of prompts is that of a run that never stopped, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from logra_lightning.data import Part, PromptLoader, TokenizedPrompts


def prompts(n: int) -> TokenizedPrompts:
    return TokenizedPrompts(
        [[i + 1] for i in range(n)], [{"x": i} for i in range(n)], list(range(n))
    )


def mixed(first: int = 3, second: int = 8) -> TokenizedPrompts:
    n = first + second
    return TokenizedPrompts(
        [[i + 1] for i in range(n)],
        [{"x": i} for i in range(n)],
        list(range(n)),
        [Part("few", 0), Part("many", first)],
    )


def rows_of(batches: Any) -> list[list[int]]:
    return [batch.rows for batch in batches]


def endless(loader: PromptLoader) -> Iterator[Any]:
    while True:
        yield from loader


def test_every_epoch_is_another_permutation_of_full_batches() -> None:
    loader = PromptLoader(prompts(11), 3, seed=0)
    assert len(loader) == 3
    first, second = rows_of(loader), rows_of(loader)
    assert first != second
    assert first == rows_of(PromptLoader(prompts(11), 3, seed=0))
    for epoch in (first, second):
        flat = [row for batch in epoch for row in batch]
        assert len(set(flat)) == 9


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("weights", [None, [2.0, 1.0]], ids=["shuffled", "mixed"])
def test_resumed_order_is_that_of_the_run_that_never_stopped(
    stop: int, weights: list[float] | None
) -> None:
    def loader() -> PromptLoader:
        return PromptLoader(mixed(), 3, seed=4, weights=weights)

    straight = loader()
    expected = [rows for _ in range(3) for rows in rows_of(straight)]
    before = loader()
    taken = rows_of(islice(endless(before), stop))
    after = loader()
    after.load_state_dict(before.state_dict())
    taken += rows_of(islice(endless(after), len(expected) - stop))
    assert taken == expected


@pytest.mark.parametrize("weights", [None, [2.0, 1.0]], ids=["shuffled", "mixed"])
def test_a_pass_has_one_order_whatever_the_size_of_a_batch(weights: list[float] | None) -> None:
    """All sizes of batches before and after a stop, which is at any batch of a pass."""

    def order_of(epoch: int) -> list[int]:
        one = PromptLoader(mixed(4, 8), 1, seed=4, weights=weights)
        one.epoch = epoch
        return [row for rows in rows_of(one) for row in rows]

    first, second = order_of(0), order_of(1)
    for size in range(1, 13):
        for batches in range(1, 12 // size + 1):
            before = PromptLoader(mixed(4, 8), size, seed=4, weights=weights)
            given = [row for rows in rows_of(islice(before, batches)) for row in rows]
            assert given == first[: size * batches]
            for next_size in range(1, 13):
                after = PromptLoader(mixed(4, 8), next_size, seed=4, weights=weights)
                after.load_state_dict(before.state_dict())
                left = 12 - len(given)
                full = left // next_size if left >= size else 0
                assert (after.batches_left if after.epoch == 0 else 0) == full
                rest = rows_of(islice(endless(after), full + 1))
                assert [row for rows in rest[:full] for row in rows] == first[len(given) :][
                    : full * next_size
                ]
                assert rest[full] == second[:next_size]


def test_an_iteration_is_as_long_as_a_pass_wherever_it_begins() -> None:
    loader = PromptLoader(prompts(11), 3, seed=0)
    expected = rows_of(loader) + rows_of(loader)
    again = PromptLoader(prompts(11), 3, seed=0)
    assert rows_of(islice(again, 2)) + rows_of(again) == expected[:5]


@pytest.mark.parametrize(("batches", "count"), [(2, 2), (9, 3), (0.7, 2), (1.0, 3), (0.1, 1)])
def test_overfitting_repeats_the_first_batches_as_they_stand(batches: float, count: int) -> None:
    loader = PromptLoader(prompts(11), 3, seed=0, overfit_batches=batches)
    assert len(loader) == 3  # Lightning takes its share of them
    firsts = [[0, 1, 2], [3, 4, 5], [6, 7, 8]][:count]
    assert rows_of(islice(endless(loader), 2 * count)) == firsts * 2


def test_overfitting_a_mix_repeats_its_first_batches() -> None:
    first, second = rows_of(islice(PromptLoader(mixed(), 3, seed=4, weights=[2.0, 1.0]), 2))
    loader = PromptLoader(mixed(), 3, seed=4, weights=[2.0, 1.0], overfit_batches=2)
    assert rows_of(islice(endless(loader), 4)) == [first, second] * 2


def test_the_state_counts_prompts() -> None:
    loader = PromptLoader(prompts(11), 3, seed=0)
    list(islice(loader, 2))
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["batch_size"]) == (0, 6, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": prompts(12)},
        {"prompts": TokenizedPrompts([[i] for i in range(11)], [{}] * 11, list(range(11)))},
        {"prompts": TokenizedPrompts([[1, 2], *[[i] for i in range(10)]], [{}] * 11, [0] * 11)},
        {"seed": 1},
        {"prompts": mixed(), "weights": [1.0, 1.0]},
        {"overfit_batches": 2},
    ],
)
def test_other_data_is_begun_at_its_start(options: dict[str, Any]) -> None:
    before = PromptLoader(prompts(11), 3, seed=0)
    list(islice(before, 2))
    given = {"prompts": prompts(11), "batch_size": 3, "seed": 0} | options
    after = PromptLoader(**given)
    with pytest.warns(UserWarning, match="prompts are not those of the checkpoint"):
        after.load_state_dict(before.state_dict())
    assert rows_of(after) == rows_of(PromptLoader(**given))


def test_where_a_token_belongs_is_part_of_the_fingerprint() -> None:
    def fingerprint(*ids: list[int]) -> str:
        count = len(ids)
        found = TokenizedPrompts(list(ids), [{}] * count, list(range(count)))
        return PromptLoader(found, 1, seed=0).fingerprint

    assert fingerprint([1], [2, 3]) == fingerprint([1], [2, 3])
    different = {fingerprint([1], [2, 3]), fingerprint([1, 2], [3]), fingerprint([2, 3], [1])}
    assert len(different) == 3


def test_each_batch_of_a_mix_holds_the_shares_and_no_source_repeats_before_its_end() -> None:
    loader = PromptLoader(mixed(), 3, seed=0, weights=[2.0, 1.0])
    batches = [batch for _ in range(2) for batch in rows_of(loader)]
    assert [sum(row < 3 for row in batch) for batch in batches] == [2] * 6
    few = [row for batch in batches for row in batch if row < 3]
    many = [row for batch in batches for row in batch if row >= 3]
    assert all(sorted(few[i : i + 3]) == [0, 1, 2] for i in range(0, 12, 3))
    assert len(set(many)) == 6  # of 8: its first pass lasts into the third epoch


@pytest.mark.parametrize("weights", [None, [1.0, 1.0]])
def test_processes_share_each_batch(weights: list[float] | None) -> None:
    def rows(**process: int) -> list[list[int]]:
        return rows_of(PromptLoader(mixed(6, 6), 4, seed=1, weights=weights, **process))

    batches = rows()
    assert len(batches) == 3
    for batch, left, right in zip(
        batches,
        rows(process_index=0, num_processes=2),
        rows(process_index=1, num_processes=2),
        strict=True,
    ):
        assert sorted(left + right) == sorted(batch)
        assert len(left) == len(right) == 2
        if weights is not None:  # also each process gets prompts of both sources
            assert [row < 6 for row in left] == [row < 6 for row in right] == [True, False]


def test_without_a_seed_order_and_last_batch_are_kept() -> None:
    loader = PromptLoader(prompts(5), 2, seed=None)
    assert len(loader) == 3
    assert rows_of(loader) == rows_of(loader) == [[0, 1], [2, 3], [4]]
    last = [
        rows_of(PromptLoader(prompts(5), 4, seed=None, process_index=r, num_processes=2))
        for r in (0, 1)
    ]
    assert sorted(row for rows in last for batch in rows for row in batch) == [0, 1, 2, 3, 4]


def test_batches_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3: the nearest is 4"):
        PromptLoader(prompts(9), 3, seed=0, num_processes=2)
    with pytest.raises(ValueError, match="prompts_per_step is 4, but there are only 3 prompts"):
        PromptLoader(prompts(3), 4, seed=0)
    with pytest.raises(ValueError, match="weight of source 'few' .* none of the 11 prompts"):
        PromptLoader(mixed(), 3, seed=0, weights=[1.0, 99.0])
