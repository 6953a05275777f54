"""Rewards that look at nothing but the completion: its text, its length, its repetitions."""

from __future__ import annotations

import re


def exact_match(completion: str, answer: object) -> float | None:
    """1 if the completion equals the answer, else 0; white space at both ends does not count.

    Of a completion that thinks aloud, what stands after the thinking is compared: see
    `after_thinking`.

    Args:
        completion: a text.
        answer: the right answer, text or a number; None if the row has none.

    Returns:
        1 or 0; None, which means that this reward does not apply, where there is no answer.
    """
    # Not above: workers load this file alone, and that one before it.
    from logra_lightning.rewards.thinking import after_thinking

    if answer is None:
        return None
    return float(after_thinking(completion).strip() == str(answer).strip())


class FormatMatch:
    r"""1 if the whole completion matches a pattern, else 0; outer white space does not count.

    Args:
        pattern: regular expression in which a dot matches line ends too, for instance
            `<think>.*</think>\s*<answer>.*</answer>`.

    Raises:
        ValueError: if the pattern does not compile.
    """

    __name__ = "format"

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} does not compile: {error}") from error

    def __call__(self, completion: str) -> float:
        """Return 1 if the completion matches, else 0."""
        return float(self.pattern.fullmatch(completion.strip()) is not None)


class SoftOverlong:
    r"""Punishes a completion of n tokens that comes close to the longest one allowed.

    With M = `max_tokens` and b = `buffer_tokens` the reward is

    .. math::
        R = 0 \text{ for } n \le M - b, \quad (M - b - n) / b \text{ for } M - b < n \le M, \quad
        -1 \text{ for } n > M

    With M = 100 and b = 20, 80 tokens get 0, 90 tokens -0.5, and 100 tokens or more -1. Source:
    DAPO, arXiv 2503.14476, equation 13.

    Args:
        max_tokens: M, in tokens; usually the same as `model.sampling.max_tokens`.
        buffer_tokens: b, in tokens: the last stretch before M, over which R falls from 0 to -1.

    Raises:
        ValueError: unless 0 < `buffer_tokens` <= `max_tokens`.
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
        """Return R, in [-1, 0], for the token ids of one completion."""
        over = len(completion_ids) - (self.max_tokens - self.buffer_tokens)
        return -min(max(over / self.buffer_tokens, 0.0), 1.0)


class RepetitionPenalty:
    r"""Punishes sequences of n tokens (n-grams) that a completion repeats.

    .. math:: R = p \, (1 - \text{distinct n-grams} / \text{n-grams})

    with p = `max_penalty`; R = 0 for a completion of fewer than n tokens. With n = 2 the tokens
    1 2 1 2 1 have four 2-grams, two of them distinct: R = p / 2. Source: arXiv 2502.03373, applied
    to tokens.

    Args:
        ngram: n, in tokens.
        max_penalty: p, 0 or less; the reward if all n-grams were the same.

    Raises:
        ValueError: if `ngram` is below 1 or `max_penalty` above 0.
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
        """Return R, in [p, 0], for the token ids of one completion."""
        count = len(completion_ids) - self.ngram + 1
        if count < 1:
            return 0.0
        distinct = {tuple(completion_ids[i : i + self.ngram]) for i in range(count)}
        return self.max_penalty * (1 - len(distinct) / count)
