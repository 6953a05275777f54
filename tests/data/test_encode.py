"""Prompts are exactly the template's tokens, with one beginning-of-sequence token where due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from logra_lightning.data.encode import PromptEncoder, PromptTemplate
from tests.conftest import TINY_POLICY
from tests.data.rows import save_chat_tokenizer, word_tokenizer

WRITES_BOS = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"
WRITES_NONE = "{% for m in messages %} {{ m['content'] }}{% endfor %}"


def encode(prompt: object, tokenizer: Any, **options: Any) -> list[int]:
    return PromptEncoder(tokenizer, "somewhere", **options)({"prompt": prompt}, "row 0")


@pytest.mark.parametrize("prompt", ["one two", [{"role": "user", "content": "one two"}]])
@pytest.mark.parametrize(("template", "expected"), [(WRITES_BOS, [0, 3, 4]), (WRITES_NONE, [3, 4])])
def test_a_template_alone_decides_on_the_first_token(
    prompt: object, template: str, expected: list[int]
) -> None:
    tokenizer = word_tokenizer(template)
    assert tokenizer("one two")["input_ids"] == [0, 3, 4]  # the tokenizer would add another
    assert encode(prompt, tokenizer) == expected


@pytest.mark.parametrize("prompt", ["one two", "<s> one two"])
def test_without_a_template_the_tokenizers_first_token_comes_once(prompt: str) -> None:
    assert encode(prompt, word_tokenizer()) == [0, 3, 4]


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "chat"))


def text(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_system_prompt_and_template_arguments_reach_the_template(chat: Any) -> None:
    ids = encode("1 + 1", chat, system_prompt="3", chat_template_kwargs={"thinking": True})
    assert text(chat, ids) == "7=38=1 + 1+"
    assert text(chat, encode("1 + 1", chat)) == "8=1 + 1-"


def test_messages_keep_their_own_system_prompt(chat: Any) -> None:
    messages = [{"role": "system", "content": "9"}, {"role": "user", "content": "1"}]
    assert text(chat, encode(messages, chat, system_prompt="3")) == "7=98=1-"
    assert len(messages) == 2


def test_keys_that_a_message_does_not_have_are_no_keys_of_it(chat: Any) -> None:
    chat.chat_template = "{% for m in messages %}{{ m | length }}={{ m['content'] }}{% endfor %}"
    message = {"role": "user", "content": "1", "name": None, "tool_calls": None}
    assert text(chat, encode([message], chat)) == "2=1"


@pytest.mark.parametrize("options", [{}, {"thinking": True}, {"add_generation_prompt": False}])
def test_ids_are_those_of_the_template(chat: Any, options: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "9"}, {"role": "user", "content": "1 + 1"}]
    defaults = {"add_generation_prompt": True, "return_dict": True}
    expected = chat.apply_chat_template(messages, **(defaults | options))["input_ids"]
    assert encode(messages, chat, chat_template_kwargs=options) == expected


def test_a_template_among_the_arguments_is_one() -> None:
    assert encode("one", word_tokenizer(), chat_template_kwargs={"chat_template": WRITES_BOS}) == [
        0,
        3,
    ]


def test_a_prompt_without_tokens_is_refused() -> None:
    words = word_tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Replace("one", "")
    words.bos_token = None
    words.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    with pytest.raises(ValueError, match="the prompt of row 0 has no tokens: 'one'"):
        encode("one", words)


def test_a_prompt_template_makes_the_prompt_of_columns(chat: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    row = {"question": "1 + 2", "meta": {"hint": "3"}, "prompt": "not this"}
    options = {"prompt_template": "{question} = {meta[hint]}"}
    plain = PromptEncoder(tokenizer, "x", **options)(row, "row 0")
    assert text(tokenizer, plain) == "<bos>1 + 2 = 3"
    assert text(chat, PromptEncoder(chat, "x", **options)(row, "row 0")) == "8=1 + 2 = 3-"


def test_doubled_braces_are_braces() -> None:
    template = PromptTemplate("{question}\nPut your final answer within \\boxed{{}}.")
    filled = template.fill({"question": "1+1?"}, "row 0")
    assert filled == "1+1?\nPut your final answer within \\boxed{}."


def test_templates_that_do_not_fit_name_columns_and_braces() -> None:
    row = {"question": "1", "answer": None}
    with pytest.raises(
        ValueError, match=r"names 'gold', 'hint', but row 3 has only 'question', 'answer'"
    ):
        PromptTemplate("{gold} {hint[0]} {question}").fill(row, "row 3")
    with pytest.raises(ValueError, match="needs 'answer', which is None in row 3"):
        PromptTemplate("{question} {answer}").fill(row, "row 3")
    with pytest.raises(ValueError, match=r"does not fit row 3: .*no_such"):
        PromptTemplate("{question.no_such}").fill(row, "row 3")
    for text in (r"\boxed{}", "no column", "{0}"):
        with pytest.raises(ValueError, match=r"must name columns, such as \{question\}"):
            PromptTemplate(text)
    with pytest.raises(ValueError, match=r"is not a format string .*write a brace .* as \{\{"):
        PromptTemplate("{question")


@pytest.mark.parametrize("template", [None, WRITES_BOS])
def test_prompts_are_checked_with_and_without_a_chat_template(template: str | None) -> None:
    tokenizer = word_tokenizer(template)
    with pytest.raises(ValueError, match="the prompt of row 0 must be a non-empty string or"):
        encode("  ", tokenizer)
    with pytest.raises(ValueError, match="row 0 is the text of a list of messages"):
        encode('[{"role": "user", "content": "one"}]', tokenizer)


def test_messages_do_not_become_text_in_a_prompt_template() -> None:
    row = {"prompt": [{"role": "user", "content": "one"}], "numbers": [1, 2]}
    filled = PromptTemplate("{prompt[0][content]} {numbers} {numbers[1]:03d} {{}}")
    assert filled.fill(row, "row 0") == "one [1, 2] 002 {}"
    with pytest.raises(ValueError, match="does not fit row 0: .*list of messages cannot stand"):
        PromptTemplate("{prompt} Think first.").fill(row, "row 0")


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([{"role": "user", "content": "1"}], {}),
        ("1", {"system_prompt": "2"}),
        ("1", {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_what_needs_a_chat_template_is_refused_without_one(
    prompt: object, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="'somewhere' has no chat template, so row 0 must be a"):
        encode(prompt, word_tokenizer(), **options)


def test_a_missing_prompt_column_lists_what_is_there() -> None:
    encoder = PromptEncoder(word_tokenizer(), "x", prompt_column="question")
    with pytest.raises(
        ValueError,
        match="row 0 has no column 'question', only 'prompt', 'a': set prompt_column",
    ):
        encoder({"prompt": "one", "a": 1}, "row 0")
