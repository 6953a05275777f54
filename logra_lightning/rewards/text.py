"""Rewards that look at nothing but the completion: its text, its length, its repetitions."""

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


class SoftOverlong:
    r"""Punishes completions that come close to the longest one allowed.

    With n tokens, M = `max_tokens` and b = `buffer_tokens` (DAPO, arXiv 2503.14476, equation 13):

    .. math::
        R = 0 \text{ for } n \le M - b, \quad (M - b - n) / b \text{ for } M - b < n \le M, \quad
        -1 \text{ for } n > M

    Args:
        max_tokens: M; the same as `model.sampling.max_tokens`, as a rule.
        buffer_tokens: b, in which the punishment grows.

    Raises:
        ValueError: a buffer that is not above 0, or above `max_tokens`.
    """

    __name__ = "soft_overlong"

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        if not 0 < buffer_tokens <= max_tokens:
            raise ValueError(
                f"SoftOverlong needs 0 < buffer_tokens <= max_tokens, got {buffer_tokens} and "
                f"{max_tokens}"
            )
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    def __call__(self, completion_ids: list[int]) -> float:
        """R, in [-1, 0]."""
        over = len(completion_ids) - (self.max_tokens - self.buffer_tokens)
        return -min(max(over / self.buffer_tokens, 0.0), 1.0)


class RepetitionPenalty:
    r"""Punishes repeated n-grams of tokens.

    .. math:: R = p \, (1 - \text{distinct n-grams} / \text{n-grams})

    with p = `max_penalty`; 0 where there are no n-grams. As in arXiv 2502.03373, over tokens.

    Args:
        ngram: n, in tokens.
        max_penalty: p, not positive.

    Raises:
        ValueError: a value out of range.
    """

    __name__ = "repetition"

    def __init__(self, ngram: int = 20, max_penalty: float = -1.0) -> None:
        if ngram < 1 or not max_penalty <= 0:
            raise ValueError(
                f"RepetitionPenalty needs ngram >= 1 and max_penalty <= 0, got {ngram} and "
                f"{max_penalty}"
            )
        self.ngram = ngram
        self.max_penalty = max_penalty

    def __call__(self, completion_ids: list[int]) -> float:
        """R, in [p, 0]."""
        count = len(completion_ids) - self.ngram + 1
        if count < 1:
            return 0.0
        distinct = {tuple(completion_ids[i : i + self.ngram]) for i in range(count)}
        return self.max_penalty * (1 - len(distinct) / count)
