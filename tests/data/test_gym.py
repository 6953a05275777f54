"""reasoning-gym makes the prompts; what is validated on is not trained on."""

from __future__ import annotations

from typing import Any

import pytest

from logra_lightning.data import GymSource, GymSpec, ReasoningGymDataModule
from logra_lightning.types import PromptBatch
from tests.conftest import TINY_POLICY
from tests.data.rows import ready

pytest.importorskip("reasoning_gym")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(**options: Any) -> ReasoningGymDataModule:
    options = {"tasks": [GymSpec("chain_sum", config=SUMS)], "size": 300, "val_size": 40} | options
    return ReasoningGymDataModule(tokenizer=str(TINY_POLICY), **options)


def test_prompts_of_validation_are_not_trained_on() -> None:
    data = ready(gym())
    train = {row["question"] for row in data.train.rows}
    val = {row["question"] for row in data.val.rows}
    assert train
    assert len(data.val) == 40
    assert not train & val
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, PromptBatch)
    assert set(batch.columns) == {"question", "answer", "metadata", "source"}


def test_tasks_are_mixed_by_weight_and_name_their_rows() -> None:
    tasks = [GymSpec("chain_sum", 3.0, SUMS), GymSpec("spell_backward", 1.0)]
    data = ready(gym(tasks=tasks, size=600, val_size=1))
    names = [row["source"] for row in data.train.rows]
    assert set(names) == {"chain_sum", "spell_backward"}
    assert all(
        row["question"].startswith("Spell") == (row["source"] != "chain_sum")
        for row in data.train.rows
    )
    # Few one-digit sums exist, and those of the validation set are left out; the mix is not exact.
    assert 0.68 < names.count("chain_sum") / len(names) < 0.82


def test_a_mistake_is_refused_and_named() -> None:
    with pytest.raises(
        ValueError,
        match="data.init_args: reasoning-gym has no task 'chain_sums'; it has .*chain_sum",
    ):
        ready(gym(tasks=[GymSpec("chain_sums")]))
    with pytest.raises(ValueError, match="data.init_args: tasks is empty"):
        gym(tasks=[])
    with pytest.raises(ValueError, match="refuses tasks: .*foo"):
        ready(gym(tasks=[GymSpec("chain_sum", config={"foo": 1})]))
    with pytest.raises(ValueError, match="refuses tasks: Duplicate"):
        ready(gym(tasks=[GymSpec("chain_sum"), GymSpec("chain_sum")]))
    assert len(ready(gym(val_size=0)).val) == 0
    with pytest.raises(
        ValueError,
        match="val_seed=3 and data.init_args.seed=3 are closer than size=300, so validation",
    ):
        gym(seed=3, val_seed=3)
    with pytest.raises(ValueError, match="data.init_args: size must be at least 1"):
        gym(size=0)
    with pytest.raises(ValueError, match="weight must be positive and finite, got 0.0"):
        GymSource([GymSpec("chain_sum")], weight=0.0).check(seed=0)


def test_tasks_with_too_few_prompts_to_hold_any_out_are_refused() -> None:
    with pytest.raises(ValueError, match="so few prompts that all are in the validation set"):
        ready(gym(size=5, val_size=3000))  # there are 200 sums of two digits
