"""The scorers of reasoning-gym's own tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class GymScore:
    """Scores a completion by the reasoning-gym task that its row came from.

    Args:
        pattern: regular expression whose last match in the completion is the answer, by its first
            group where it has one; None takes the whole completion. For instance
            `<answer>(.*?)</answer>`. No match scores 0.

    Raises:
        ValueError: a pattern that does not compile.
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
        """The task's own score, in [0, 1]; None, not applicable, where the row has no task."""
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
        """The answer of each of B completions, None where the pattern does not match."""
        return [self._answer(completion) for completion in completions]

    def prepare(self) -> None:
        """Import the tasks; called once by the processes of `Reward.timeout_s`."""
        import reasoning_gym  # noqa: F401

    def _answer(self, completion: str) -> str | None:
        if self.pattern is None:
            return completion.strip()
        matches = list(self.pattern.finditer(completion))
        return matches[-1].group(1 if self.pattern.groups else 0).strip() if matches else None
