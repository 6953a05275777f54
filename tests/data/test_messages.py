"""Messages are taken in one form; every other is refused by row, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from logra_lightning.data.messages import check_last_speaker, checked_messages, is_messages

USER = {"role": "user", "content": "5+0?"}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {}}}]


def test_a_string_is_what_the_user_says() -> None:
    assert checked_messages("5+0?", "row 3") == [USER]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "5", "image": None}, {"type": "text", "text": "+0?"}]
    (message,) = checked_messages([{"role": "user", "content": parts}], "row 3")
    assert message == {"role": "user", "content": "5\n+0?"}


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, "5+0?", {"type": "text"}])
def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    with pytest.raises(ValueError, match="message 0 of row 3 has a part .* is no text"):
        checked_messages([{"role": "user", "content": [part]}], "row 3")


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"from": "human", "value": "5+0?"}, "'from', 'value'"),
        ({"content": "5+0?"}, "'content'"),
        ({"role": None, "content": "5+0?"}, "'content'"),
        ({"role": "user"}, "'role'"),
        ({"role": "user", "content": None}, "'role'"),
        ({"role": "user", "content": None, "tool_calls": CALLS}, "'role', 'tool_calls'"),
        ({}, "no key with a value"),
    ],
)
def test_other_keys_are_named_with_those_that_are_needed(
    message: dict[str, Any], found: str
) -> None:
    with pytest.raises(
        ValueError, match=f"message 1 of row 3 has {found}, but a message needs 'role' and 'cont"
    ):
        checked_messages([USER, message], "row 3")


def test_only_tools_and_those_who_call_them_may_say_nothing() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": CALLS, "name": None}
    said = checked_messages([USER, call, {"role": "tool", "content": ""}], "row 3")
    assert said[1] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert said[2] == {"role": "tool", "content": ""}
    for role in ("system", "user", "assistant"):
        with pytest.raises(ValueError, match="message 0 of row 3 has no text in its content"):
            checked_messages([{"role": role, "content": " \n"}], "row 3")


def test_a_role_of_its_own_must_stand_in_quotes_in_the_template() -> None:
    messages = [{"role": "judge", "content": "5"}]
    assert checked_messages(messages, "row 3", "{% if role == 'judge' %}") == messages
    assert checked_messages(messages, "row 3", '{% if role == "judge" %}') == messages
    with pytest.raises(ValueError, match="has the role 'judge', .* use one of system, developer"):
        checked_messages(messages, "row 3", "no judge here")


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "5+0?"}]',
        ' [{"from": "human", "value": "5+0?"}]\n',
        "[{'role': 'user', 'content': '\\d'}]",  # as Python writes it
    ],
)
def test_the_text_of_a_list_of_messages_is_no_prompt(text: str) -> None:
    with pytest.raises(ValueError, match="prompt of row 3 is the text of a list of messages"):
        checked_messages(text, "row 3")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]: sort",
        '[{"from": 1, "to": 2}]',
        '[{"role": "cook"}, 3]',
        '[{"role": "user", "content": "5"',
        "[\\d 'role': 1]",
    ],
)
def test_other_lists_in_a_text_are_text(text: str) -> None:
    assert checked_messages(text, "row 3")[0]["content"] == text


@pytest.mark.parametrize("prompt", ["", "  ", None, 3, [], {}])
def test_what_is_neither_text_nor_messages_names_its_row(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt of row 3 must be a non-empty string or a list"):
        checked_messages(prompt, "row 3")
    with pytest.raises(ValueError, match="message 0 of row 3 must have role and content"):
        checked_messages(["text"], "row 3")


def test_the_last_speaker_is_the_one_whose_turn_it_is() -> None:
    answer = {"role": "assistant", "content": "5"}
    check_last_speaker([USER], "row 3", False)
    check_last_speaker([USER, answer], "row 3", True)
    with pytest.raises(ValueError, match="row 3 is the assistant's own: drop .*continue_final_m"):
        check_last_speaker([USER, answer], "row 3", False)
    with pytest.raises(ValueError, match="row 3 is by the role 'user', but .*continue_final_me"):
        check_last_speaker([answer, USER], "row 3", True)


def test_messages_are_known_by_their_keys() -> None:
    assert is_messages([USER])
    assert is_messages([{"from": "human", "value": "5"}])
    for other in ([], "text", [1, 2], [{"from": 1, "to": 2}], [USER, 3]):
        assert not is_messages(other)
