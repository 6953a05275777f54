"""Rewards that look at the text alone."""

from __future__ import annotations

import re


def exact_match(completion: str, answer: object) -> float | None:
    """1 when the completion is the answer, up to white space at both ends, else 0.

    None, not applicable, where there is no answer.
    """
    return None if answer is None else float(completion.strip() == str(answer).strip())


class FormatMatch:
    r"""1 where the whole completion matches a pattern, up to white space at both ends, else 0.

    Args:
        pattern: regular expression in which a dot matches line ends too, for instance
            `<think>.*</think>\s*<answer>.*</answer>`.

    Raises:
        ValueError: a pattern that does not compile.
    """

    __name__ = "format"

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} does not compile: {error}") from error

    def __call__(self, completion: str) -> float:
        """1 or 0."""
        return float(self.pattern.fullmatch(completion.strip()) is not None)
