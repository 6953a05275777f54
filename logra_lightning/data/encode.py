"""`PromptEncoder`: makes token ids of a row's prompt, through its templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from logra_lightning.data.chat import ChatFormat
from logra_lightning.data.messages import checked_messages, is_messages


class PromptTemplate:
    r"""Makes a prompt of a row's columns, which it names in braces.

    `{question}\nPut your final answer within \boxed{{}}.` makes of the row `{"question": "1 + 1?"}`
    the prompt `1 + 1?\nPut your final answer within \boxed{}.`

    Args:
        text: a format string as in `str.format`, whose fields are columns of the row or what lies
            in them (`{meta[hint]}`). A brace that belongs to the text is written twice.

    Raises:
        ValueError: `text` is not a format string, or it names no column.
    """

    def __init__(self, text: str) -> None:
        try:
            fields = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise ValueError(
                f"prompt_template {text!r} is not a format string ({error}): write a brace of the "
                f"text as {{{{ or }}}}"
            ) from error
        self.text = text
        self.columns = list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in fields))
        if not self.columns or any(not name or name.isdigit() for name in self.columns):
            raise ValueError(
                f"prompt_template {text!r} must name columns, such as {{question}}; a brace of the "
                f"text is written {{{{ or }}}}"
            )

    def fill(self, row: Mapping[str, Any], row_name: str) -> str:
        """Return the prompt of a row.

        Args:
            row: column name to value.
            row_name: what an error calls the row, such as `training row 3 of 'gsm8k'`.

        Raises:
            ValueError: a column that the template names is missing or None, or does not have the
                fields that the template takes from it.
        """
        missing = [name for name in self.columns if name not in row]
        if missing:
            raise ValueError(
                f"prompt_template names {', '.join(map(repr, missing))}, but {row_name} has only "
                f"{', '.join(map(repr, row))}: name those, write a brace of the text as {{{{ or "
                f"}}}}, or rename with columns"
            )
        empty = [name for name in self.columns if row[name] is None]
        if empty:
            raise ValueError(
                f"prompt_template needs {', '.join(map(repr, empty))}, which is None in {row_name}"
            )
        try:
            return _TEXT.vformat(self.text, (), row)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(f"prompt_template does not fit {row_name}: {error!r}") from error


class _TextFormatter(Formatter):
    """As `str.format`, but a list of messages is no text."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if is_messages(value):
            raise ValueError(
                "a list of messages cannot stand in a text; name the field of one, such as "
                "{messages[0][content]}, or set prompt_column"
            )
        return format(value, format_spec)


_TEXT = _TextFormatter()


class PromptEncoder:
    """Makes the token ids of prompts, exactly as they go to the engine.

    Where the tokenizer has a chat template, they are what the template writes and nothing else: a
    beginning-of-sequence token is there if the template writes it. Where it has none, a string gets
    the special tokens that the tokenizer itself adds, each once.

    Args:
        tokenizer: a tokenizer as `transformers` makes it.
        path: folder or hub name of the tokenizer, for errors.
        prompt_column: column with the prompt, which is a string or a list of messages.
        prompt_template: text that makes the prompt of other columns; None takes `prompt_column`.
        system_prompt: system message for prompts that have none.
        chat_template_kwargs: further arguments for the chat template.

    Raises:
        ValueError: `prompt_template` or one of `chat_template_kwargs` cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str,
        *,
        prompt_column: str = "prompt",
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self.prompt_column = prompt_column
        self.template = None if prompt_template is None else PromptTemplate(prompt_template)
        options = chat_template_kwargs or {}
        self.chat: ChatFormat | None = None
        if tokenizer.chat_template is not None or options.get("chat_template") is not None:
            self.chat = ChatFormat(tokenizer, system_prompt, options)
        self.needs_chat = bool(system_prompt or options)

    def __call__(self, row: Mapping[str, Any], row_name: str) -> list[int]:
        """Return the token ids of a row's prompt.

        Args:
            row: column name to value.
            row_name: what an error calls the row, such as `training row 3 of 'gsm8k'`.

        Raises:
            ValueError: the row has no prompt, or one that this tokenizer cannot take.
        """
        prompt = self._prompt(row, row_name)
        if self.chat is not None:
            text, add_special_tokens = self.chat.text(prompt, row_name), False
        else:
            text, add_special_tokens = self._plain(prompt, row_name)
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not ids:
            raise ValueError(f"the prompt of {row_name} has no tokens: {text!r}")
        return ids

    def _plain(self, prompt: Any, row_name: str) -> tuple[str, bool]:
        """The text of a prompt without a template, and whether it gets the special tokens."""
        checked_messages(prompt, row_name)
        if not isinstance(prompt, str) or self.needs_chat:
            raise ValueError(
                f"the tokenizer of {self.path!r} has no chat template, so {row_name} must be a "
                f"string, without system_prompt and chat_template_kwargs"
            )
        # A prompt that begins with the first token's text must not get that token twice.
        bos = self.tokenizer.bos_token
        return prompt, not (bool(bos) and prompt.startswith(bos))

    def _prompt(self, row: Mapping[str, Any], row_name: str) -> Any:
        if self.template is not None:
            filled = self.template.fill(row, row_name)
            if not filled.strip():
                raise ValueError(
                    f"the prompt of {row_name} is empty: prompt_template fills to nothing there"
                )
            return filled
        if self.prompt_column not in row:
            raise ValueError(
                f"{row_name} has no column {self.prompt_column!r}, only "
                f"{', '.join(map(repr, row))}: set prompt_column"
            )
        return row[self.prompt_column]
