"""exact_match compares text up to outer white space; FormatMatch wants the whole of it."""

from __future__ import annotations

import pytest

from logra_lightning.rewards import FormatMatch, exact_match


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
