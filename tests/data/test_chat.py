"""A prompt is what the template writes: with all that was said in it, and one frame around it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from logra_lightning.data.chat import ChatFormat
from tests.data.rows import word_tokenizer

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<s>{{ m['role'] }} {% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
)
USER = {"role": "user", "content": "5+0?"}
START = {"role": "assistant", "content": "<think>"}


def text(
    prompt: Any, template: str = CHATML, system_prompt: str | None = None, **options: Any
) -> str:
    return ChatFormat(word_tokenizer(template), system_prompt, options).text(prompt, "row 3")


def refused(match: str, prompt: Any = "5+0?", template: str = CHATML, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as raised:
        text(prompt, template, **options)
    assert "\n" not in str(raised.value)


def test_the_text_is_that_of_the_template() -> None:
    expected = "<s>system\nBe brief.</s>\n<s>user\n5+0?</s>\n<s>assistant\n"
    assert text("5+0?", system_prompt="Be brief.") == expected
    own = [{"role": "developer", "content": "Be long."}, USER]
    assert "Be brief" not in text(own, system_prompt="Be brief.")


def test_given_arguments_win_over_the_defaults() -> None:
    assert text("5+0?", add_generation_prompt=False) == "<s>user\n5+0?</s>\n"
    prefilled = text([USER, START], continue_final_message=True)
    assert prefilled == "<s>user\n5+0?</s>\n<s>assistant\n<think>"
    assert text("5+0?", chat_template="{{ messages[0]['content'] }}!") == "5+0?!"


def test_the_last_speaker_is_checked() -> None:
    refused("row 3 is the assistant's own", [USER, START])
    refused("row 3 is by the role 'user'", [USER], continue_final_message=True)


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "padding", "max_length", "messages"])
def test_arguments_that_would_change_what_is_returned_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs has {name}, .*leave it out"):
        ChatFormat(word_tokenizer(CHATML), None, {name: True})
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(ValueError, match="both continue_final_message and add_generation_prompt"):
        ChatFormat(word_tokenizer(CHATML), None, both)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{{ raise_exception('System role\nnot supported') }}", "System role not supported"),
        ("{{ messages[5]['content'] }}", "no element 5"),
        ("{{ messages[0]['content'] + 5 }}", "str"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_what_a_template_raises_is_one_line_with_its_own_words(body: str, words: str) -> None:
    refused(f"template refuses row 3: .*{words}.*: change the row or chat_template_k", "5", body)
    refused("change system_prompt, the row or", "5", body, system_prompt="Be brief.")


def test_a_prompt_that_the_template_leaves_out_is_refused() -> None:
    no_system = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    refused(r"leaves out system_prompt \('Be brief", "5", no_system, system_prompt="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, USER]
    refused(r"leaves out the system's message of row 3 \('Be brief", messages, no_system)
    refused("leaves out the user's message of row 3", "5", "an empty frame")


def test_only_white_space_may_change() -> None:
    assert text(" 5 +\n\n0?", "{{ messages[0]['content'].split() | join(' ') }}") == "5 + 0?"
    refused("leaves out the user's message", "5+0?", "{{ messages[0]['content'][1:] }}")


@pytest.mark.parametrize("content", ["5+0?", [{"type": "text", "text": "5+0?"}], "user"])
def test_templates_for_parts_and_for_strings_get_what_they_take(content: Any) -> None:
    said = content if isinstance(content, str) else "5+0?"
    messages = [{"role": "user", "content": content}]
    assert text(messages, PARTS_ONLY) == f"<s>user {said}</s>"
    assert text(messages, "{{ messages[0]['content'] }}") == said
    assert text(messages, "{{ messages[0]['content'][0]['text'] }}") == said


def test_the_list_of_parts_is_never_the_prompt() -> None:
    raises_on_strings = "{{ '' if messages[0]['content'] is not string else 1 + '' }}"
    refused("refuses row 3: .*unsupported operand", "5", raises_on_strings + "{{ messages }}")
    refused("leaves out the user's", "5+0?", "{{ messages[0]['content'] | replace('0', '') }}")


@pytest.mark.parametrize("prompt", ["<s>user\n5+0?", [{"role": "user", "content": "5+0?</s>"}]])
def test_a_prompt_that_has_the_frame_already_is_refused(prompt: Any) -> None:
    refused("the user's message of row 3 already has '</?s>', which the chat template", prompt)
    refused("system_prompt already has '<s>'", "5+0?", system_prompt="<s>Be brief.")


def test_only_special_tokens_that_the_template_writes_are_its_frame() -> None:
    assert text("x < <unk> 5+0? <think>") == "<s>user\nx < <unk> 5+0? <think></s>\n<s>assistant\n"
    assert text("<s>", "{{ messages[0]['content'] }}") == "<s>"


def test_special_tokens_without_a_name_are_part_of_the_frame_too() -> None:
    tokenizer: PreTrainedTokenizerFast = word_tokenizer("<|x|>{{ messages[0]['content'] }}")
    tokenizer.add_tokens(["<|x|>"], special_tokens=True)
    with pytest.raises(ValueError, match=r"row 3 already has '<\|x\|>'"):
        ChatFormat(tokenizer, None, {}).text("<|x|>5", "row 3")
