"""The order of prompts is that of a run that never stopped, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from logra_lightning.prompt_loader import PromptLoader, TokenizedPrompts


def prompts(n: int) -> TokenizedPrompts:
    return TokenizedPrompts(
        [[i + 1] for i in range(n)], [{"x": i} for i in range(n)], list(range(n))
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


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_resumed_order_is_that_of_the_run_that_never_stopped(stop: int) -> None:
    straight = PromptLoader(prompts(11), 3, seed=4)
    expected = [rows for _ in range(3) for rows in rows_of(straight)]
    before = PromptLoader(prompts(11), 3, seed=4)
    taken: list[list[int]] = []
    iterator = iter(before)
    while len(taken) < stop:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(before)
        else:
            taken.append(batch.rows)
    after = PromptLoader(prompts(11), 3, seed=4)
    after.load_state_dict(before.state_dict())
    while len(taken) < len(expected):
        taken += rows_of(after)
    assert taken == expected


def test_ranks_share_each_batch() -> None:
    whole = rows_of(PromptLoader(prompts(12), 4, seed=1))
    parts = [rows_of(PromptLoader(prompts(12), 4, seed=1, rank=r, world_size=2)) for r in (0, 1)]
    for batch, left, right in zip(whole, *parts, strict=True):
        assert sorted(left + right) == sorted(batch)
        assert len(left) == len(right) == 2


def test_without_a_seed_order_and_last_batch_are_kept() -> None:
    loader = PromptLoader(prompts(5), 2, seed=None)
    assert len(loader) == 3
    assert rows_of(loader) == rows_of(loader) == [[0, 1], [2, 3], [4]]


def test_batches_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3: the nearest is 4"):
        PromptLoader(prompts(9), 3, seed=0, world_size=2)
    with pytest.raises(ValueError, match="prompts_per_step is 4, but there are only 3 prompts"):
        PromptLoader(prompts(3), 4, seed=0)
