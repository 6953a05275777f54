"""`GymScore`: reasoning-gym's own scorers as a reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class GymScore:
    """Scores a completion with the scorer of the reasoning-gym task that made its row.

    Args:
        pattern: regular expression that finds the answer, for instance `<answer>(.*?)</answer>`.
            Its last match after the thinking (see `after_thinking`) counts: the first group of the
            pattern, or the whole match if it has no group. A completion without a match scores 0.
            None takes all that stands after the thinking as the answer.

    Raises:
        ValueError: if the pattern does not compile.
    """

    __name__ = "gym_score"

    def __init__(self, pattern: str | None = None) -> None:
        try:
            self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} does not compile: {error}") from error

    def __call__(
        self, completion: str, question: str, answer: str, metadata: dict[str, Any] | None
    ) -> float | None:
        """Return the task's own score, in [0, 1].

        Args:
            completion: the text to score.
            question: the task's question, a column of the row.
            answer: the task's right answer, a column of the row.
            metadata: what the task needs to score an answer, a column of the row; None if the row
                comes from another data set, to which this reward does not apply.

        Returns:
            The score, or None where this reward does not apply.
        """
        if metadata is None:
            return None
        from reasoning_gym import get_score_answer_fn

        found = self._answer(completion)
        if found is None:
            return 0.0
        score_answer = get_score_answer_fn(metadata["source_dataset"])
        entry = {"question": question, "answer": answer, "metadata": metadata}
        return float(score_answer(found, entry))

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        """Return the answer in each of B completions; None where the pattern does not match."""
        return [self._answer(completion) for completion in completions]

    def prepare(self) -> None:
        """Import the tasks before worker processes are forked (see `Reward.timeout_s`)."""
        import reasoning_gym  # noqa: F401

    def _answer(self, completion: str) -> str | None:
        # Not above: workers load this file alone, and that one before it.
        from logra_lightning.rewards.thinking import after_thinking

        text = after_thinking(completion)
        if self.pattern is None:
            return text.strip()
        matches = list(self.pattern.finditer(text))
        return matches[-1].group(1 if self.pattern.groups else 0).strip() if matches else None
