"""A row's messages, checked: nobody's words are lost, doubled or given to the wrong speaker."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = (("role", "content"), ("from", "value"))
_NAMES_A_SPEAKER = re.compile(r"""["'](role|from)["']\s*:""")
_SHOWN = 10  # an error shows at most so many keys


def checked_messages(prompt: Any, row_name: str, template: str = "") -> list[dict[str, Any]]:
    r"""Return the messages of a prompt, each with a role and, as a rule, a text as its content.

    A string is what the user says. Text parts are joined by line breaks, so that
    `[{"type": "text", "text": "1 +"}, {"type": "text", "text": "1?"}]` becomes `1 +\n1?`. A key
    whose value is None is left out, since parquet fills the keys of one message into all others.

    Args:
        prompt: a string, or a list of messages as in
            `[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]`.
        row_name: what an error calls the row, such as `training row 3 of 'gsm8k'`.
        template: text of the chat template; it may use further roles, which it names in quotes.

    Raises:
        ValueError: the prompt is neither of both or empty, or a message has no role, an unknown
            one, or no text.
    """
    if isinstance(prompt, str) and prompt.strip():
        if _is_text_of_messages(prompt):
            raise ValueError(
                f"the prompt of {row_name} is the text of a list of messages, which would be "
                f"trained on as it stands: store the list itself, not its JSON"
            )
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not prompt:
        raise ValueError(
            f"the prompt of {row_name} must be a non-empty string or a list of messages, got "
            f"{prompt!r}"
        )
    return [
        _checked(message, f"message {number} of {row_name}", template)
        for number, message in enumerate(prompt)
    ]


def check_last_speaker(
    messages: Sequence[Mapping[str, Any]], row_name: str, continued: Any
) -> None:
    """Raise ValueError where it is not the assistant's turn to speak.

    Args:
        messages: of the row, checked.
        row_name: what an error calls the row.
        continued: `continue_final_message` of `chat_template_kwargs`: whether the policy goes on
            with the last message instead of beginning one of its own.
    """
    role = messages[-1]["role"]
    if continued and role != "assistant":
        raise ValueError(
            f"the last message of {row_name} is by the role {role!r}, but chat_template_kwargs has "
            f"continue_final_message, which continues one of the assistant: add that message, or "
            f"leave the option out"
        )
    if role == "assistant" and not continued:
        raise ValueError(
            f"the last message of {row_name} is the assistant's own: drop it, or let the policy "
            f"continue it with chat_template_kwargs: {{continue_final_message: true}}"
        )


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, with the keys of OpenAI or of ShareGPT."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(each, Mapping) and _has_keys(each) for each in value)
    )


def _has_keys(message: Mapping[str, Any]) -> bool:
    return any(all(key in message for key in keys) for keys in _KEYS)


def _is_text_of_messages(text: str) -> bool:
    """Whether a text is a list of messages in JSON or in Python."""
    if not (text.lstrip().startswith("[") and _NAMES_A_SPEAKER.search(text)):
        return False
    for parse in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings(action="ignore"):  # of a prompt's escapes
                return is_messages(parse(text.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return False


def _checked(message: Any, name: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must have role and content, got {message!r}")
    found = {key: value for key, value in message.items() if value is not None}
    role = found.get("role")
    may_be_empty = role == "tool" or (role == "assistant" and bool(found.get("tool_calls")))
    if role is None or ("content" not in found and not may_be_empty):
        keys = ", ".join(map(repr, list(found)[:_SHOWN])) or "no key with a value"
        raise ValueError(
            f"{name} has {keys}, but a message needs 'role' and 'content': rename its keys in the "
            f"data (ShareGPT's from is role, with human as user and gpt as assistant; its value "
            f"is content)"
        )
    if role not in ROLES and not (isinstance(role, str) and _in_quotes(role, template)):
        raise ValueError(
            f"{name} has the role {role!r}, which the chat template does not name: use one of "
            f"{', '.join(ROLES)}"
        )
    if "content" not in found:
        return found | {"content": None}  # which templates of tools ask for
    content = _joined(found["content"], name)
    if not may_be_empty and not content.strip():
        raise ValueError(f"{name} has no text in its content: leave the message or the row out")
    return found | {"content": content}


def _joined(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"{name} must have a text, or a list of text parts, as its content, got {content!r}"
        )
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(
                f"{name} has a part of its content that is no text ({kind!r}): prompts are text, "
                f"with parts such as {{'type': 'text', 'text': '1 + 1?'}}"
            )
    return "\n".join(part["text"] for part in content)


def _in_quotes(role: str, template: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template
