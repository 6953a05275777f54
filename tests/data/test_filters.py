"""Prompts that cannot be used are refused with numbers, or left out and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from logra_lightning.data.filters import check_token_ids
from tests.conftest import TINY_POLICY
from tests.data.rows import ROWS, Fixed, TwoSources, ready


def long_row(terms: int) -> dict[str, Any]:
    return {"prompt": "1 + " * terms + "1 =", "answer": str(terms + 1), "level": None}


# The tiny policy reads characters, and puts <bos> before them: 4 * 10 + 3 + 1 = 44 tokens.
LONG = [*ROWS[:3], long_row(10), *ROWS[3:]]


def test_overlong_prompts_are_an_error_with_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"1 of 11 training prompts .* max_prompt_tokens=20; the longest, row 3, has 44 "
        r"tokens: raise the limit or set data.init_args.overlong_prompts=drop",
    ):
        ready(Fixed(LONG, max_prompt_tokens=20))


def test_overlong_prompts_are_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data = ready(Fixed(LONG, max_prompt_tokens=20, overlong_prompts="drop"))
    assert "1 of 11 training prompts" in caplog.text
    assert "Dropped row 3." in caplog.text
    assert [row["answer"] for row in data.train.rows] == [row["answer"] for row in ROWS]
    assert data.train.numbers == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def odd_answers(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Answers are twice the row's number: those with 4 and 8 fall out."""
    return {i: "no gold" for i, row in enumerate(rows) if row["answer"] in ("8", "16", None)}


def test_unusable_rows_are_an_error_with_reasons() -> None:
    data = ready(Fixed())
    with pytest.raises(
        ValueError,
        match=r"2 of 10 training rows cannot be used: row 4 \(no gold\), row 8 \(no gold\): mend "
        r"them or set data.init_args.unusable_rows=drop",
    ):
        data.leave_out(odd_answers)
    assert len(data.train) == 10
    with pytest.raises(ValueError, match=r"1 of 1 validation rows cannot be used: row 0"):
        ready(Fixed(ROWS[:3], ROWS[8:9])).leave_out(odd_answers)


def test_unusable_rows_are_left_out_of_both_sets_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = ready(Fixed(LONG, ROWS[7:], max_prompt_tokens=20, overlong_prompts="drop"))
    data.unusable_rows = "drop"
    with caplog.at_level("INFO"):
        data.leave_out(odd_answers)
    assert "2 of 10 training rows cannot be used. Dropped row 5 (no gold), row 9" in caplog.text
    assert "1 of 3 validation rows cannot be used. Dropped row 1 (no gold)." in caplog.text
    assert data.train.numbers == [0, 1, 2, 4, 6, 7, 8, 10]
    assert [row["answer"] for row in data.val.rows] == ["14", "18"]
    caplog.clear()
    data.leave_out(odd_answers)
    assert caplog.text == ""


def test_many_rows_are_counted_but_not_all_named() -> None:
    with pytest.raises(ValueError, match=r"10 of 10 .*row 0 \(no\), .*row 9 \(no\): mend"):
        ready(Fixed()).leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))
    data = ready(Fixed(ROWS * 2))
    with pytest.raises(ValueError, match=r"20 of 20 .*row 9 \(no\) and 10 more: mend"):
        data.leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))


def test_rows_of_several_sources_are_named_by_source() -> None:
    data = ready(TwoSources(str(TINY_POLICY)))
    with pytest.raises(ValueError, match=r"row 8 of 'sums' \(no gold\), row 0 of 'others'"):
        data.leave_out(odd_answers)


def test_a_training_source_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 10 training rows of 'Fixed' is left"):
        ready(Fixed(max_prompt_tokens=3, overlong_prompts="drop"))
    data = ready(Fixed(unusable_rows="drop"))
    with pytest.raises(ValueError, match="none of the 10 training rows of 'Fixed' is left"):
        data.leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))
    data = ready(TwoSources(str(TINY_POLICY), unusable_rows="drop"))
    with pytest.raises(ValueError, match="none of the 2 training rows of 'others' is left"):
        data.leave_out(odd_answers)


def test_tokens_without_an_embedding_are_refused_by_row() -> None:
    check_token_ids(258, "training row 3", 259)
    with pytest.raises(ValueError, match="training row 3 has the token id 259, .*259 embeddings"):
        check_token_ids(259, "training row 3", 259)
