"""Rewards get the columns they name, aligned by row, and add up; nonsense is named with its row."""

from __future__ import annotations

import math

import pytest
import torch

from logra_lightning.rewards import Reward, check_columns, exact_match, score
from logra_lightning.types import PromptBatch

PROMPTS = PromptBatch(
    [[1], [2, 3]],
    {"answer": ["4", "5"], "meta": [{"deep": [1, None]}, None]},
    rows=[10, 20],
)
TEXTS = ["4", " 4 ", "5", "four"]
IDS = [[4], [4, 0], [5], [9, 9]]


def test_columns_arrive_by_name_and_aligned() -> None:
    seen = []

    def spy(
        completion: str, answer: str, meta: object, completion_ids: list, prompt_ids: list
    ) -> int:
        seen.append((completion, answer, meta, completion_ids, prompt_ids))
        return 1

    score([Reward(spy)], PROMPTS, TEXTS, IDS)
    first, second = {"deep": [1, None]}, None
    assert seen == [
        ("4", "4", first, [4], [1]),
        (" 4 ", "4", first, [4, 0], [1]),
        ("5", "5", second, [5], [2, 3]),
        ("four", "5", second, [9, 9], [2, 3]),
    ]


def test_kwargs_receive_everything_and_optional_arguments_may_be_absent() -> None:
    def everything(**columns: object) -> float:
        return float(
            sorted(columns) == ["answer", "completion", "completion_ids", "meta", "prompt_ids"]
        )

    def optional(completion: str, hint: str = "none") -> float:
        return float(hint == "none")

    scores = score([Reward(everything), Reward(optional)], PROMPTS, TEXTS, IDS)
    assert scores.total.tolist() == [2.0] * 4
    assert scores.metrics == {}


def test_terms_are_weighted_and_one_that_does_not_apply_counts_nothing() -> None:
    def sometimes(completion: str) -> float | None:
        return None if "4" in completion else 3

    scores = score(
        [Reward(exact_match), Reward(sometimes, weight=0.5, name="half")], PROMPTS, TEXTS, IDS
    )
    assert scores.total.tolist() == [1.0, 1.0, 2.5, 1.5]
    assert scores.by_name["exact_match"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert scores.by_name["half"].isnan().tolist() == [True, True, False, False]
    assert scores.by_name["half"].dtype == scores.total.dtype == torch.float32


@pytest.mark.parametrize("value", [math.nan, math.inf, "good", "0.5", [1.0], object(), 10**400])
def test_nonsense_is_refused_with_the_name_and_the_row(value: object) -> None:
    def broken(answer: str) -> object:
        return value if answer == "5" else 0.0

    with pytest.raises(ValueError, match=r"reward 'broken' returned .* for row 20"):
        score([Reward(broken)], PROMPTS, TEXTS, IDS)


def test_a_completion_to_which_no_reward_applies_has_none() -> None:
    def sometimes(completion: str) -> float | None:
        return None if "4" in completion else 0.0

    for on_error in ("raise", "zero"):
        scores = score([Reward(sometimes, on_error=on_error)], PROMPTS, TEXTS, IDS)  # type: ignore[arg-type]
        assert scores.total.isnan().tolist() == [True, True, False, False]
        assert scores.total[2:].tolist() == [0.0, 0.0]
        assert scores.metrics.get("rewards/sometimes/errors", 0.0) == 0.0


def test_missing_column_lists_what_is_there() -> None:
    def needs(completion: str, solution: str) -> float:
        return 0.0

    with pytest.raises(
        ValueError, match=r"'needs' asks for 'solution', .* has only 'answer', 'meta'"
    ):
        check_columns([Reward(needs)], PROMPTS.columns)


def test_reserved_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="columns called 'completion'"):
        check_columns([Reward(exact_match)], ["answer", "completion"])
