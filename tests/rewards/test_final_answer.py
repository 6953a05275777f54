"""One rule says which marked answer of a text counts; the table in the docs is that of the code."""

from __future__ import annotations

import re

import pytest

from logra_lightning.rewards.final_answer import final_answer
from tests.conftest import ROOT


def documented() -> list[tuple[str, str | None]]:
    """The rows of the table in docs/objective.md: a completion, and its answer if it has one."""
    page = (ROOT / "docs" / "objective.md").read_text()
    part = page.split("### Which answer counts\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(.+)` \| (?:`(.*)`|none) \|$", part, re.MULTILINE)
    return [(text, answer or None) for text, answer in rows]


def test_the_table_of_the_docs_is_read() -> None:
    assert len(documented()) >= 16
    assert any(answer is None for _, answer in documented())


@pytest.mark.parametrize(("text", "answer"), documented())
def test_the_answer_is_that_of_the_docs(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


FORMS = [
    r"\boxed{%s}",
    r"\fbox{%s}",
    r"\boxed %s",
    "#### %s",
    "<answer>%s</answer>",
    "The answer is %s.",
]


@pytest.mark.parametrize("last", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_of_two_forms_the_last_counts_with_and_without_thinking(first: str, last: str) -> None:
    text = f"So {first % 41}\nNo: {last % 42}\nThat is it."
    for before in ("", "<think>", "<think>Perhaps", "<thinking>Is it", ""):
        thought = f"{before} {first % 40}</think>" if before else ""
        assert final_answer(thought + text) == "42"
    assert final_answer(f"{first % 41}</think>{last % 42}") == "42"
    assert final_answer(f"{first % 41}</think> I do not know.") is None
    assert final_answer(f"<think>{first % 41} {last % 42}") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no mark", None),
        (r"\boxed{1}", "1"),
        (r"\boxed {1} \fbox{2}", "2"),
        (r"\framebox{1} so \boxed 42.", "42"),
        (r"\boxed{1} \boxed-3", "-3"),
        (r"\boxed{\text{The answer is } 5}", "5"),
        (r"\boxed{The answer is 5.}", "5"),
        (r"\boxed{a #### b}", "a #### b"),
        (r"the answer is \boxed{5}.", "5"),
        (r"\boxed{1}, and the answer is \boxed{2}", "2"),
        (r"\fboxed{3}", "3"),
        (r"\boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        ("\\boxed{1}\n\\boxed{2}", "2"),
        (r"\boxed{1} then \boxed{", "1"),
        (r"\boxed{1} then \boxed{\frac{1}{2}", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{\boxed{2}}", r"\boxed{2}"),
        (r"\boxed{\boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} \text{ or } \boxed{2}", "1, 2"),
        (r"\boxed{1}, \boxed{1}", "1"),
        (r"\boxed{0}. \boxed{1} and \boxed{2}", "1, 2"),
        ("4 + 4 = 8\n#### 8", "8"),
        ("#### 8\nwords", "8"),
        ("#### 8\n#### 9", "9"),
        (r"#### 8 and \boxed{9}", "9"),
        (r"\boxed{9}" + "\n#### 8", "8"),
        ("** #### 8**", "8"),
        ("####", None),
        ("### 8", None),
        ("#### The answer is 8", "8"),
        (r"#### \boxed{8}", "8"),
        ("<answer> 8\n</answer>", "8"),
        ("<answer>7</answer> <answer>8</answer> <answer>9", "8"),
        (r"<answer>So it is \boxed{8}.</answer>", "8"),
        ("<answer>#### 8</answer>", "8"),
        ("<answer>The answer is 8</answer>", "8"),
        ("<answer></answer>", ""),
        ("The answer is 42. I used 3 steps.", "42"),
        ("The answer is $42$, as in the 7 cases before.", "$42$"),
        ("**Final Answer:** -1/2", "-1/2"),
        ("Answer: $70,000 a year", "$70,000"),
        ("The answer is: \\(x + 1\\).", "\\(x + 1\\)"),
        ("the answer is \\frac{1}{2}.", "\\frac{1}{2}"),
        ("The answer is x = 5.", "x = 5"),
        ("The answer is 1331 and 1728.", "1331 and 1728"),
        ("The answer is 5 or 6", "5 or 6"),
        ("the answer is 5 apples", "5"),
        ("The answer is (B).", "(B)"),
        ("The answer is A mess.", None),
        ("The answer is 3 + x", None),
        ("The answer is wrong.", None),
        ("I cannot answer, is 5 right?", None),
    ],
)
def test_the_last_complete_mark_is_the_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer
