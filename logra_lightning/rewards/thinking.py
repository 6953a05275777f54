"""What of a completion is its answer, where the model thinks aloud before it."""

from __future__ import annotations

import re

_OPEN = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_CLOSE = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


def after_thinking(completion: str) -> str:
    """Return what stands after the last `</think>` (or `</thinking>`).

    That is the whole text where there is no thinking, and nothing where the thinking does not end:
    `<think>4?</think> 5` gives ` 5`, `<think>4?` gives an empty text. The opening tag may stand in
    the prompt, so `4?</think> 5` gives ` 5` too.

    Args:
        completion: a completion.
    """
    answer = _CLOSE.split(completion)[-1]
    return "" if _OPEN.search(answer) else answer
