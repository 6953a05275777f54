"""Recognise answers that can be compared without algebra, and write them alike."""

from __future__ import annotations

import re
from fractions import Fraction

_WRAPPING = re.compile(r"(?<!\\)\\(?:[()\[\]!,;]|displaystyle\b)")
_PER_CENT = re.compile(r"(?<!\\)%")  # which begins a comment in LaTeX
_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",  # minus
        "\u2013": "-",  # en dash
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b0": r"^\circ",
        "\u00a0": " ",
    }
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|mathbf|textit)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
_LONG_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
_NUMBER = r"[-+]?(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(
    rf"(?P<number>{_NUMBER})"
    r"|(?P<sign>-?)(?:\\[dt]?frac\s*\{(?P<a>-?\d+)\}\s*\{(?P<b>-?\d+)\}|(?P<c>\d+)\s*/\s*(?P<d>\d+))"
)
# Letters after a number are its unit, as in "42 dollars", unless they are one of these names.
_UNIT = re.compile(rf"({_NUMBER})\s*(?!(?:pi|sin|cos|tan|log|exp)\b)[A-Za-z]{{2,}}[A-Za-z ]*")
_WORD = re.compile(r"(?<!\\)\b(?!(?:and|or|pi|sin|cos|tan|log|ln|exp|sqrt)\b)[A-Za-z]{2,}")
_NAMED = re.compile(r"\\[A-Za-z]+\s*\{[A-Za-z ]*\}")  # \begin{cases}, \operatorname{lcm}
_SEVERAL = re.compile(r",\s|;|\b(?:and|or)\b")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_RUN = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:\s+\d+(?:[.,]\d+)?)+")
_MAX_DIGITS = 400
_MAX_WORDS = 3


def normalized(answer: str) -> str:
    r"""Return an answer without what means nothing in it.

    That is dollar signs, thin spaces, `\( \)` around it, and a full stop at its end. Unicode signs
    and `%` become LaTeX: `\$70,000.` gives `70,000`.

    Args:
        answer: LaTeX or plain text.
    """
    answer = answer.translate(_SYMBOLS).replace(r"\$", "").replace("$", "")
    answer = _PER_CENT.sub(r"\\%", _WRAPPING.sub("", answer))
    answer = answer.replace("{,}", ",").replace("**", "").strip()
    return answer[:-1].rstrip() if answer.endswith(".") else answer


def plain_number(answer: str) -> Fraction | None:
    r"""Return the exact value of an integer, a decimal or a simple fraction; None for all else.

    Thousands separators and a unit in words do not count: `1,234`, `.5`, `\frac{1}{2}` and
    `5 apples` are plain numbers; `2\pi`, `50%` and `40 2` are not.

    Args:
        answer: an answer, as `normalized` returns it.
    """
    if len(answer) > _MAX_DIGITS:
        return None
    answer = _TEXT.sub(lambda m: f" {m.group(1)}", answer).strip() if "\\" in answer else answer
    if unit := _UNIT.fullmatch(answer):
        answer = unit.group(1)
    match = _PLAIN.fullmatch(answer)
    if match is None:
        return None
    if number := match.group("number"):
        return Fraction(re.sub("[, ]", "", number).rstrip("."))
    over, under = match.group("a") or match.group("c"), match.group("b") or match.group("d")
    if int(under) == 0:
        return None
    return Fraction(int(over), int(under)) * (-1 if match.group("sign") else 1)


def plain_words(answer: str) -> str | None:
    """Return an answer that consists of words in lower case; None for all else.

    `None of  them` gives `none of them`; `5 apples` and `x` are not words.

    Args:
        answer: an answer, as `normalized` returns it.
    """
    answer = _TEXT.sub(r"\1", answer).strip()
    if not _WORDS.fullmatch(answer) or not _LONG_WORD.search(answer):
        return None
    return " ".join(answer.lower().split())


def is_run(answer: str) -> bool:
    """Return whether an answer is several numbers in a row, such as `40 2`.

    They must be recognised because math-verify adds them up. `1 234` is one number.

    Args:
        answer: an answer, as `normalized` returns it.
    """
    return _RUN.fullmatch(answer) is not None and plain_number(answer) is None


def is_bare(text: str) -> bool:
    """Return whether a text without a marked answer is nothing but an answer.

    That is one short line of mathematics, as `x^2 + 1`, or of words, as `even`; `It is 5.` is not.

    Args:
        text: a completion.
    """
    text = text.strip()
    if not 0 < len(text) <= 100 or "\n" in text or "$" in text.strip("$"):
        return False
    return not _WORD.search(_TEXT.sub("", text)) or plain_words(text) is not None


def is_prose(answer: str) -> bool:
    """Return whether an answer is a sentence: too many words for mathematics, but not words alone.

    Args:
        answer: an answer, as `normalized` returns it.
    """
    words = _LONG_WORD.findall(_NAMED.sub("", answer))
    return len(words) > _MAX_WORDS and plain_words(answer) is None


def as_list_like(gold: str, answer: str) -> str:
    """Write `125,250` as two numbers, `125, 250`, if the gold answer is several numbers.

    Args:
        gold: the gold answer, as `normalized` returns it.
        answer: the given answer, as `normalized` returns it.
    """
    several = _SEVERAL.search(gold) and _THOUSANDS.fullmatch(answer)
    return answer.replace(",", ", ") if several else answer
