"""Numbers and words are told from mathematics, in linear time."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from logra_lightning.rewards.final_answer import final_answer
from logra_lightning.rewards.math_text import (
    as_list_like,
    is_bare,
    is_prose,
    is_run,
    normalized,
    plain_number,
    plain_words,
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("$5$", "5"),
        (r"\(5\)", "5"),
        (r"\$70,000", "70,000"),
        ("5.", "5"),
        ("5.0", "5.0"),
        ("50%", r"50\%"),
        (r"50\%", r"50\%"),
        ("\u22123", "-3"),
        ("2\u03c0", r"2\pi"),
        (r"1{,}234\!,5", "1,234,5"),
        (r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}"),
    ],
)
def test_what_means_nothing_is_left_out(answer: str, expected: str) -> None:
    assert normalized(answer) == expected


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", Fraction(42)),
        ("-3", Fraction(-3)),
        ("007", Fraction(7)),
        ("1,234,567", Fraction(1234567)),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1,234.50", Fraction(2469, 2)),
        ("2/4", Fraction(1, 2)),
        ("-1 / 3", Fraction(-1, 3)),
        (r"\frac{-1}{3}", Fraction(-1, 3)),
        (r"-\dfrac{9}{7}", Fraction(-9, 7)),
        (r"5\text{ apples}", Fraction(5)),
        ("5 square units", Fraction(5)),
        (r"5\mathrm{cm}", Fraction(5)),
        ("1,23", None),
        ("1,2345", None),
        ("1, 234", None),
        ("1 234", Fraction(1234)),
        ("40 2", None),
        ("1 1/2", None),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("5x", None),
        ("2 pi", None),
        (r"2\pi", None),
        ("50%", None),
        ("x", None),
        ("", None),
        ("9" * 500, None),
        ("9" * 300, Fraction(10**300 - 1)),
    ],
)
def test_plain_numbers_are_exact(answer: str, value: Fraction | None) -> None:
    assert plain_number(answer) == value


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Tuesday", "tuesday"),
        (r"\text{none of  the above}", "none of the above"),
        ("x", None),
        ("ab", None),
        (r"\sin x", None),
        ("5 apples", None),
    ],
)
def test_words_are_compared_in_lower_case(answer: str, words: str | None) -> None:
    assert plain_words(answer) == words


def test_a_bare_answer_is_one_line_of_maths_or_words() -> None:
    for text in ("x^2 + 1", "42\n", r"\frac{1}{2}", "even", r"5\text{ apples}", "1 or 2", "$x$"):
        assert is_bare(text)
    for text in ("", "The answer is 5.", "It is 5.", "5\n6", "a $x$", "x + " * 50):
        assert not is_bare(text)


def test_prose_is_told_from_mathematics() -> None:
    assert is_prose("the value is unclear, because 5 or 6")
    for gold in (
        "1331 and 1728",
        r"\begin{pmatrix} 1 \end{pmatrix} + \begin{pmatrix} 2 \end{pmatrix}",
    ):
        assert not is_prose(gold)
    assert not is_prose("none of the above answers")


def test_numbers_that_stand_side_by_side_are_told() -> None:
    assert all(map(is_run, ("40 2", "1 2 3", "1.5 2")))
    assert not any(map(is_run, ("42", "1 234", "1 1/2", "1, 2", "")))


def test_commas_without_spaces_part_numbers_where_several_are_asked_for() -> None:
    assert as_list_like("125, 250", "250,125") == "250, 125"
    assert as_list_like("125 and 250", "250,125") == "250, 125"
    assert as_list_like("250125", "250,125") == "250,125"
    assert as_list_like("1, 2", r"\{1,2\}") == r"\{1,2\}"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20000,
        "\\boxed{" * 20000 + "}" * 20000,
        "\\boxed{1}" + " " * 100000 + "\\boxed{2}",
        "\\boxed{1} " * 20000,
        "\\boxed{" + "9" * 100000 + "}",
        "#" * 100000,
        "#### " * 30000,
        "{" * 100000,
        "<think>" * 20000 + "</think>" * 20000,
        "<answer>" * 20000 + "</answer>",
        "the answer is \\(" * 20000,
        "the answer is 5" + " " * 100000 + "+",
        "the answer is " + "5 or " * 20000,
        "the answer is \\" + "x" * 100000 + "}" * 1000,
        "answer: $" * 20000,
    ],
    ids=[
        *("open", "nested", "gap", "many", "long", "hashes", "marks", "braces"),
        *("thoughts", "tags", "sentences", "end", "list", "word", "dollars"),
    ],
)
def test_degenerate_completions_take_no_time(text: str) -> None:
    started = time.process_time()
    answer = normalized(final_answer(text) or text)
    plain_number(answer), plain_words(answer), is_bare(text), as_list_like("1, 2", answer)
    assert time.process_time() - started < 2
