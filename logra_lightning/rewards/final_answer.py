r"""Find the marked answer of a text: one rule for boxes, `####`, `<answer>` and "the answer is".

docs/objective.md has the rule and a table of examples, which the tests read.
"""

from __future__ import annotations

import re

from logra_lightning.rewards.thinking import after_thinking

_BOX = r"\\(?:boxed|fboxed|fbox|framebox)"
_BRACE = re.compile(_BOX + r"\s*\{|\\[{}\\]|[{}]")
_OPEN_BOX = re.compile(_BOX + r"\s*([-+]?\d[\d.,/]*)")  # \boxed 5
_JOINING = re.compile(r"[\s$]*(?:,|,?\s*(?:\\text\s*\{\s*)?(?:and|or)\s*\}?)[\s$]*")
_MAX_GAP = 30  # characters between joined boxes; the pattern is slow on long white space
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_STOPS = ".,;:!?*"  # that a sentence may end with
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"

# Mathematics after "answer is" or "answer:". All lengths have a bound, so that no text takes long.
_NUMBER = r"\\?\$?[-+\u2212]?\\?\$?(?:\d[\d.,/]{0,400}|\.\d{1,400})\\?%?"
_SAID = re.compile(
    r"\banswer\b[*_\s]{0,4}(?::|=|\bis\b)[:*_}\s]{0,6}("
    # a number, several, or an expression without spaces, which other words or nothing may follow
    rf"(?:[a-z]\s?=\s?)?(?:{_NUMBER}|-?\\(?!f?boxed|fbox|framebox)[a-z]+\S{{0,400}})"
    rf"(?:(?:,\s?|\s)(?:and\s|or\s)?{_NUMBER})*"
    r"(?=[*_)}\]]*(?:[.,;:!?][*_)]*(?:\s|$)|\s*$|\s*\n|\s+(?:a\s|[a-z]{2})|<))"
    # mathematics between its own marks
    r"|\$[^$\n]{1,400}\$|\\\(.{1,400}?\\\)|\\\[.{1,400}?\\\]"
    # a letter of a choice
    r"|(?-i:\(?[A-J]\)?)(?=[*_]*(?:[.,;!]|\s*\n|\s*$|<)))",
    re.IGNORECASE,
)


def final_answer(text: str) -> str | None:
    r"""Return the marked answer of a text; None if nothing is marked.

    What stands before the last `</think>` never counts, and nothing counts where thinking does not
    end. Of the rest, the complete mark that begins last counts, whichever of these it is:

    - `\boxed{5}`, `\fbox{5}`, `\framebox{5}`, `\boxed 5`;
    - `#### 5`, up to the end of the line;
    - `<answer>5</answer>`;
    - `the answer is 5`, `Answer: $5$`, where a number, mathematics or a letter such as (B) follows.

    A mark may stand in a sentence, and a box in one of the others. What stands in a box marks
    nothing, but for `\boxed{the answer is 5}`. Boxes with nothing between them but a comma, `and`
    or `or` are one answer: `\boxed{1} and \boxed{2}` gives `1, 2`.

    Args:
        text: a completion or a worked solution.
    """
    text = after_thinking(text)
    boxes = _boxes(text)
    marks = [_joined(text, boxes)] if boxes else []
    inside = iter(boxes)
    box = next(inside, None)
    others = [
        (m.start(1), m.group(1).split(_TAG_CLOSE)[0].rstrip("*")) for m in _HASHES.finditer(text)
    ]
    others += [(m.start(1), m.group(1).rstrip(_STOPS)) for m in _SAID.finditer(text)]
    for mark in sorted(others):
        while box is not None and box[1] <= mark[0]:
            box = next(inside, None)
        if box is None or mark[0] < box[0]:
            marks.append(mark)
    end = text.rfind(_TAG_CLOSE)
    start = text.rfind(_TAG_OPEN, 0, max(end, 0))
    if start >= 0:
        marks.append((start, text[start + len(_TAG_OPEN) : end]))
    return max(marks)[1].strip() if marks else None


def _joined(text: str, boxes: list[tuple[int, int, str]]) -> tuple[int, str]:
    """Where the last box begins, and its content with those that are joined to it."""
    first = len(boxes) - 1
    while (
        first > 0
        and boxes[first][0] - boxes[first - 1][1] <= _MAX_GAP
        and _JOINING.fullmatch(text, boxes[first - 1][1], boxes[first][0])
    ):
        first -= 1
    contents = [_said_in(content) for _, _, content in boxes[first:]]
    return boxes[-1][0], ", ".join(dict.fromkeys(contents))


def _said_in(content: str) -> str:
    r"""The content of a box; of `The answer is 5`, or `\text{The answer is }5`, only `5`."""
    said = list(_SAID.finditer(content))
    return said[-1].group(1).rstrip(_STOPS) if said else content


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each complete box that stands in no other box; in linear time."""
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
    for bare in _OPEN_BOX.finditer(text):
        found.append((bare.start(), bare.end(), bare.group(1).rstrip(".,")))
    outer: list[tuple[int, int, str]] = []
    for box in sorted(found):
        if not outer or box[0] >= outer[-1][1]:
            outer.append(box)
    return outer
