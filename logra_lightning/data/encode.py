"""`PromptEncoder`: the prompt of a row to token ids, through its templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any


class PromptTemplate:
    r"""Makes a prompt of columns, as `{question}\nPut your final answer within \boxed{{}}.` does.

    Args:
        text: a format string of `str.format`, whose fields are columns; braces are doubled.

    Raises:
        ValueError: not a format string, or one without a column.
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

    def fill(self, row: Mapping[str, Any], where: str) -> str:
        """The prompt of a row.

        Args:
            row: with the columns of the template.
            where: what to call the row in an error.

        Raises:
            ValueError: a column that is not there or is None.
        """
        missing = [name for name in self.columns if name not in row]
        if missing:
            raise ValueError(
                f"prompt_template names {', '.join(map(repr, missing))}, but {where} has only "
                f"{', '.join(map(repr, row))}: name those, write a brace of the text as {{{{ or "
                f"}}}}, or rename with columns"
            )
        empty = [name for name in self.columns if row[name] is None]
        if empty:
            raise ValueError(
                f"prompt_template needs {', '.join(map(repr, empty))}, which is None in {where}"
            )
        try:
            return self.text.format(**row)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(f"prompt_template does not fit {where}: {error!r}") from error


class PromptEncoder:
    """Token ids of prompts, as they go to the engine.

    With a chat template they are exactly what it writes, the beginning-of-sequence token included.
    Without one a string gets the special tokens that the tokenizer adds, once.

    Args:
        tokenizer: of `transformers`.
        path: where it came from, for errors.
        prompt_column: holds a string or a list of messages.
        prompt_template: makes the prompt of other columns instead.
        system_prompt: put before messages that have none.
        chat_template_kwargs: passed to the chat template.
        option: where the user typed these options.
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
        option: str = "data.init_args",
    ) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self.prompt_column = prompt_column
        self.template = None if prompt_template is None else PromptTemplate(prompt_template)
        self.system_prompt = system_prompt
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.option = option

    def __call__(self, row: Mapping[str, Any], where: str) -> list[int]:
        """The token ids of a row's prompt.

        Args:
            row: a row of the data set.
            where: what to call it in an error.

        Raises:
            ValueError: no prompt in this row, or one that the tokenizer cannot take.
        """
        prompt = self._prompt(row, where)
        if self.tokenizer.chat_template is not None:
            return self._encode_messages(self._messages(prompt))
        if not isinstance(prompt, str) or self.system_prompt or self.chat_template_kwargs:
            raise ValueError(
                f"the tokenizer of {self.path!r} has no chat template, so {where} must be a "
                f"string, without system_prompt and chat_template_kwargs in {self.option}"
            )
        # A prompt that writes the first token itself must not get a second one.
        bos = self.tokenizer.bos_token
        begun = bool(bos) and prompt.startswith(bos)
        return list(self.tokenizer(prompt, add_special_tokens=not begun)["input_ids"])

    def _prompt(self, row: Mapping[str, Any], where: str) -> Any:
        if self.template is not None:
            filled = self.template.fill(row, where)
            if not filled.strip():
                raise ValueError(
                    f"the prompt of {where} is empty: {self.option}.prompt_template fills to "
                    f"nothing there"
                )
            return filled
        if self.prompt_column not in row:
            raise ValueError(
                f"{where} has no column {self.prompt_column!r}, only "
                f"{', '.join(map(repr, row))}: set {self.option}.prompt_column"
            )
        prompt = row[self.prompt_column]
        is_text = isinstance(prompt, str) and bool(prompt.strip())
        is_chat = isinstance(prompt, list) and bool(prompt)
        if is_text or (is_chat and all(isinstance(message, dict) for message in prompt)):
            return prompt
        raise ValueError(
            f"the prompt of {where} must be a non-empty string or a list of messages, got "
            f"{prompt!r}"
        )

    def _messages(self, prompt: Any) -> list[dict[str, Any]]:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        # Parquet gives every message the keys of all others, as None.
        messages = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in prompt
        ]
        if self.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        return list(encoded["input_ids"])
