"""The final answer in a text, and answers that can be told apart without algebra."""

from __future__ import annotations

import re
from fractions import Fraction

_BRACE = re.compile(r"\\f?boxed\s*\{|\\[{}\\]|[{}]")
_JOINING = re.compile(r"[\s$]*(?:,|,?\s*(?:\\text\s*\{\s*)?(?:and|or)\s*\}?)[\s$]*")
_WRAPPING = re.compile(r"(?<!\\)\\(?:[()\[\]!,;]|displaystyle\b)")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
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
# Other letters than these after a number are its unit: "42 dollars".
_UNIT = re.compile(rf"({_NUMBER})\s*(?!(?:pi|sin|cos|tan|log|exp)\b)[A-Za-z]{{2,}}[A-Za-z ]*")
_WORD = re.compile(r"(?<!\\)\b(?!(?:and|or|pi|sin|cos|tan|log|ln|exp|sqrt)\b)[A-Za-z]{2,}")
_NAMED = re.compile(r"\\[A-Za-z]+\s*\{[A-Za-z ]*\}")  # \begin{cases}, \operatorname{lcm}
_SEVERAL = re.compile(r",\s|;|\b(?:and|or)\b")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_RUN = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:\s+\d+(?:[.,]\d+)?)+")
_MAX_DIGITS = 400
_MAX_WORDS = 3
_MAX_GAP = 30  # characters between joined boxes; the pattern is slow on long white space


def final_answer(text: str) -> str | None:
    r"""The marked answer of a completion or a worked solution, None where nothing is marked.

    It is the content of the last complete `\boxed{...}`, or what follows the last `####` on its
    line, whichever stands later. Boxes joined by nothing but a comma, `and` or `or` are one answer.

    Args:
        text: a completion or a worked solution.
    """
    boxes = _boxes(text)
    hashes = list(_HASHES.finditer(text))
    if hashes and (not boxes or hashes[-1].start() > boxes[-1][0]):
        return hashes[-1].group(1).strip().rstrip("*")
    if not boxes:
        return None
    joined = [boxes.pop()]
    while (
        boxes
        and joined[0][0] - boxes[-1][1] <= _MAX_GAP
        and _JOINING.fullmatch(text, boxes[-1][1], joined[0][0])
    ):
        joined.insert(0, boxes.pop())
    return ", ".join(dict.fromkeys(content for _, _, content in joined))


def normalized(answer: str) -> str:
    """An answer without currency and dollar signs, thin spaces, and a full stop at its end.

    Args:
        answer: LaTeX or plain text.
    """
    answer = answer.translate(_SYMBOLS).replace(r"\$", "").replace("$", "")
    answer = _WRAPPING.sub("", answer)
    answer = answer.replace("{,}", ",").replace("**", "").strip()
    return answer[:-1].rstrip() if answer.endswith(".") else answer


def plain_number(answer: str) -> Fraction | None:
    """The exact value of an integer, decimal or simple fraction, None for everything else.

    Thousands separators and a unit in words are left out.

    Args:
        answer: as `normalized` gives it.
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
    """An answer in words, as `none of them`, in lower case; None for everything else.

    Args:
        answer: as `normalized` gives it.
    """
    answer = _TEXT.sub(r"\1", answer).strip()
    if not _WORDS.fullmatch(answer) or not _LONG_WORD.search(answer):
        return None
    return " ".join(answer.lower().split())


def is_run(answer: str) -> bool:
    """Whether an answer is several numbers with nothing between them, which math-verify adds up.

    Args:
        answer: as `normalized` gives it.
    """
    return _RUN.fullmatch(answer) is not None and plain_number(answer) is None


def is_bare(text: str) -> bool:
    """Whether an unmarked text is an answer and nothing else: one short line of maths or words.

    Args:
        text: a completion.
    """
    text = text.strip()
    if not 0 < len(text) <= 100 or "\n" in text or "$" in text.strip("$"):
        return False
    return not _WORD.search(_TEXT.sub("", text)) or plain_words(text) is not None


def is_prose(answer: str) -> bool:
    """Whether an answer has more words than mathematics does, among other things.

    Args:
        answer: as `normalized` gives it.
    """
    words = _LONG_WORD.findall(_NAMED.sub("", answer))
    return len(words) > _MAX_WORDS and plain_words(answer) is None


def as_list_like(gold: str, answer: str) -> str:
    """The answer, with `125,250` read as two numbers where the gold one is several.

    Args:
        gold: as `normalized` gives it.
        answer: the same.
    """
    several = _SEVERAL.search(gold) and _THOUSANDS.fullmatch(answer)
    return answer.replace(",", ", ") if several else answer


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each complete box that is in no other; in linear time."""
    found: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token.group().endswith("{") and token.group() != r"\{":
            opened.append(token)
        elif token.group() == "}" and opened:
            opening = opened.pop()
            if opening.group() == "{":
                continue
            while found and found[-1][0] > opening.start():
                found.pop()
            found.append((opening.start(), token.end(), text[opening.end() : token.start()]))
    return found
