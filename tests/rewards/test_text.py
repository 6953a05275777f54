"""Rewards of the completion alone: its text, and formulas of its length worked by hand."""

from __future__ import annotations

import pytest

from logra_lightning.rewards import FormatMatch, RepetitionPenalty, SoftOverlong, exact_match


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [("12", "12", 1.0), (" 12\n", "12", 1.0), ("12", 12, 1.0), ("1 2", "12", 0.0), ("", "0", 0.0)],
)
def test_exact_match(completion: str, answer: object, expected: float) -> None:
    assert exact_match(completion, answer) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> Bye.", 0.0),
        ("", 0.0),
    ],
)
def test_the_whole_completion_has_the_format(completion: str, expected: float) -> None:
    reward = FormatMatch(r"<think>.*</think>\s*<answer>.*</answer>")
    assert reward(completion) == expected


def test_a_format_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        FormatMatch("(")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)],
)
def test_soft_overlong_falls_linearly_within_the_buffer(tokens: int, expected: float) -> None:
    assert SoftOverlong(max_tokens=100, buffer_tokens=20)([7] * tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ids", "ngram", "expected"),
    [
        ([], 2, 0.0),
        ([1], 2, 0.0),
        ([1, 2, 3, 4], 2, 0.0),
        # 12 21 12 21: two distinct of four
        ([1, 2, 1, 2, 1], 2, -0.25),
        # 5 five times: one distinct of five
        ([5] * 5, 1, -0.4),
        # 555 three times
        ([5] * 5, 3, -0.5 * 2 / 3),
        # 12 21, none twice
        ([1, 2, 1], 2, 0.0),
    ],
)
def test_repetition_counts_distinct_ngrams(ids: list[int], ngram: int, expected: float) -> None:
    assert RepetitionPenalty(ngram, max_penalty=-0.5)(ids) == pytest.approx(expected)


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 < buffer_tokens <= max_tokens, got 0 and 10"):
        SoftOverlong(10, 0)
    with pytest.raises(ValueError, match="0 < buffer_tokens <= max_tokens, got 11 and 10"):
        SoftOverlong(10, 11)
    with pytest.raises(ValueError, match="ngram >= 1 and max_penalty <= 0, got 0 and -1.0"):
        RepetitionPenalty(0)
    with pytest.raises(ValueError, match="got 20 and 0.5"):
        RepetitionPenalty(max_penalty=0.5)
