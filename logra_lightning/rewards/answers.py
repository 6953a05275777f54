"""What rewards tell besides scores: which rows they cannot score, and a completion's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logra_lightning.rewards.parameters import Parameters
from logra_lightning.rewards.reward import Reward
from logra_lightning.rewards.thinking import after_thinking


def unusable_rows(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Find the rows that some reward cannot score.

    A reward's function is asked if it has a method `check_rows`: it gets one list for each column
    that its signature names, and returns one reason, or None, for each row.

    Args:
        rewards: all rewards of the run.
        rows: the columns of each row, by name.

    Returns:
        For each unusable row, its position in `rows` and the reason of the first reward that cannot
        score it, in order of position.
    """
    reasons: dict[int, str] = {}
    for reward in rewards:
        check_rows = getattr(reward.function, "check_rows", None)
        if check_rows is None or not rows:
            continue
        names = Parameters.of(check_rows).among(rows[0])
        found = check_rows(**{name: [row[name] for row in rows] for name in names})
        for position, reason in enumerate(found):
            if reason is not None:
                reasons.setdefault(position, f"reward {reward.label!r}: {reason}")
    return dict(sorted(reasons.items()))


def voted_answers(rewards: Sequence[Reward], completions: Sequence[str]) -> list[str | None]:
    """Return the answer of each completion as text, for a majority vote.

    The answers come from the first reward whose function has a method `answers(completions)`. If no
    reward has one, the answer is all that stands after the thinking, without outer white space.

    Args:
        rewards: all rewards of the run.
        completions: B texts.

    Returns:
        B answers; answers that count as equal have the same spelling, and None is no answer.
    """
    for reward in rewards:
        answers = getattr(reward.function, "answers", None)
        if answers is not None:
            return list(answers(completions))
    return [after_thinking(completion).strip() or None for completion in completions]
