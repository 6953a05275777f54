"""Answers are compared with math-verify; test_math_answer has them in the processes of a reward."""

from __future__ import annotations

import pytest

from logra_lightning.rewards.math_grader import MathGrader

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("gold", "answer", "is_text", "equal"),
    [
        (r"\frac{1}{2}", "0.5", False, True),
        (r"(x+1)^2", "x^2+2x+1", False, True),
        ("12", "13", False, False),
        ("12", r"So it is $\boxed{12}$.", True, True),
        ("12", "no answer at all", True, False),
        ("???", "12", False, None),
    ],
)
def test_answers_are_compared(gold: str, answer: str, is_text: bool, equal: bool | None) -> None:
    grader = MathGrader()
    grader.prepare()
    assert grader.equal(gold, answer, is_text) is equal
    assert grader.usable(gold) is (equal is not None)


def test_equal_values_share_a_spelling_without_being_simplified() -> None:
    grader = MathGrader()
    assert grader.canonical(r"\sqrt{8}", False) == grader.canonical(r"2\sqrt{2}", False)
    assert grader.canonical("(x+1)^2", False) != grader.canonical("x^2+2x+1", False)
    assert grader.canonical("x = 3", False) == grader.canonical("3", False)
    assert grader.canonical("nothing", True) is None
