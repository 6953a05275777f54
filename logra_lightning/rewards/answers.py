"""What the rewards of a run say beside scores: which rows are unusable, and what is voted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logra_lightning.rewards.parameters import Parameters
from logra_lightning.rewards.reward import Reward


def unusable_rows(rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Rows that a reward cannot score, with its reason.

    A reward's function is asked if it has a method `check_rows`: it gets one list for each column
    that its signature names, and returns one reason, or None, for each row.

    Args:
        rewards: all terms.
        rows: columns of each row.

    Returns:
        Position of the row to the first reason against it.
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
    """The answer of each completion for a majority vote, equal ones alike; None where it has none.

    By the first reward whose function has `answers(completions)`, else the text without white
    space at both ends.

    Args:
        rewards: all terms.
        completions: B texts.
    """
    for reward in rewards:
        answers = getattr(reward.function, "answers", None)
        if answers is not None:
            return list(answers(completions))
    return [completion.strip() for completion in completions]
