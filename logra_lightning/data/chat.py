"""`ChatFormat`: writes messages as the chat template does, and refuses what it loses or doubles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logra_lightning.data.messages import check_last_speaker, checked_messages

# What the encoder itself decides: it needs the text of one conversation, and all its tokens.
_OURS = (
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
_MUST_STAND = ("system", "developer", "user")  # a template may shorten what others said
_PROBE = "a text that no template has: 0f9b"
_WRITTEN_PARTS = ("'type': 'text'", '"type": "text"')
_SHOWN = 300  # characters of a template's own words in an error


def check_template_kwargs(options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of the chat template that cannot be given."""
    ours = [name for name in options if name in _OURS]
    if ours:
        raise ValueError(
            f"chat_template_kwargs has {', '.join(ours)}, which prompts do not leave open: leave "
            f"it out"
        )
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise ValueError(
            "chat_template_kwargs has both continue_final_message and add_generation_prompt: the "
            "policy continues the last message or begins one of its own, so leave one out"
        )


class ChatFormat:
    """Writes a row's messages as one text, by the tokenizer's chat template.

    The text holds what system, developer and user say. Some templates take content only as a list
    of parts, and would write an empty frame around a string: they get parts.

    Args:
        tokenizer: a tokenizer as `transformers` makes it, with a chat template.
        system_prompt: system message for prompts that have none.
        options: further arguments for the chat template; they win over the defaults.

    Raises:
        ValueError: there is no such template, or an option cannot be given.
    """

    def __init__(
        self, tokenizer: Any, system_prompt: str | None, options: Mapping[str, Any]
    ) -> None:
        check_template_kwargs(options)
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.continued = options.get("continue_final_message", False)
        self.options = {"add_generation_prompt": not self.continued, **options}
        self.template = tokenizer.get_chat_template(
            options.get("chat_template"), options.get("tools")
        )
        self._forms = [_as_strings, _as_parts]
        # A short prompt may stand in an empty frame by chance; this one does not.
        if not self._probe(_as_strings) and self._probe(_as_parts):
            self._forms.reverse()
        frame = self._probe(self._forms[0]) or self.template
        self._frame_tokens = [token for token in _special_tokens(tokenizer) if token in frame]

    def text(self, prompt: Any, row_name: str) -> str:
        """Return the text of a prompt, which still has to become tokens.

        Args:
            prompt: a string or a list of messages.
            row_name: what an error calls the row, such as `training row 3 of 'gsm8k'`.

        Raises:
            ValueError: the messages cannot be used, the template refuses them or leaves out what
                one of them says, or the prompt already has the template's frame.
        """
        messages = checked_messages(prompt, row_name, self.template)
        names = [f"the {message['role']}'s message of {row_name}" for message in messages]
        if self.system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
            names.insert(0, "system_prompt")
        check_last_speaker(messages, row_name, self.continued)
        self._check_frame(messages, names)
        problem, cause = "", None
        for form in self._forms:
            try:
                text = self._rendered(form(messages), self.options)
            except Exception as error:  # a template may do whatever it likes
                words = " ".join(str(error).split())[:_SHOWN]
                found = f"the chat template refuses {row_name}: {words or type(error).__name__}"
                cause = cause or error
            else:
                missing = _left_out(messages, names, text)
                if missing is None:
                    return text
                found = f"the chat template leaves out {missing}"
            problem = problem or found
        where = "system_prompt, the row" if names[0] == "system_prompt" else "the row"
        raise ValueError(f"{problem}: change {where} or chat_template_kwargs") from cause

    def _check_frame(self, messages: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        for message, name in zip(messages, names, strict=True):
            content = message["content"] or ""
            for token in self._frame_tokens:
                if token in content:
                    raise ValueError(
                        f"{name} already has {token!r}, which the chat template writes around "
                        f"each message: give the plain text, or a list of messages"
                    )

    def _probe(self, form: Any) -> str:
        """One message of the user in its frame; nothing where the template loses or refuses it."""
        options = {**self.options, "add_generation_prompt": False, "continue_final_message": False}
        messages = [{"role": "user", "content": _PROBE}]
        try:
            text = self._rendered(form(messages), options)
        except Exception:  # its rows will say why
            return ""
        return text if _left_out(messages, ["the message"], text) is None else ""

    def _rendered(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _as_strings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages


def _as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message
        if message["content"] is None
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _left_out(messages: Sequence[Mapping[str, Any]], names: Sequence[str], text: str) -> str | None:
    """The first content that does not stand in the text as it is, whatever the white space."""
    collapsed: str | None = None
    for message, name in zip(messages, names, strict=True):
        if message["role"] not in _MUST_STAND or message["content"].strip() in text:
            continue
        collapsed = " ".join(text.split()) if collapsed is None else collapsed
        if " ".join(message["content"].split()) not in collapsed:
            return f"{name} ({message['content'][:_SHOWN]!r})"
    # A template for strings would write the list of parts itself.
    for mark in _WRITTEN_PARTS:
        if mark in text and not any(mark in (message["content"] or "") for message in messages):
            return "parts of messages"
    return None


def _special_tokens(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))
