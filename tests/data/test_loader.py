"""The order of prompts is that of a run that never stopped, on any number of processes."""

from __future__ import annotations

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
    taken: list[list[int]] = []
    iterator = iter(before)
    while len(taken) < stop:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(before)
        else:
            taken.append(batch.rows)
    after = loader()
    after.load_state_dict(before.state_dict())
    while len(taken) < len(expected):
        taken += rows_of(after)
    assert taken == expected


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
    with pytest.raises(ValueError, match="weight of source 'few' .* none of the 9 prompts"):
        PromptLoader(mixed(), 3, seed=0, weights=[1.0, 99.0])
