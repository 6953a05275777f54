"""Rewards that look at the text alone."""

from __future__ import annotations


def exact_match(completion: str, answer: object) -> float:
    """1 when the completion is the answer, up to white space at both ends, else 0."""
    return float(completion.strip() == str(answer).strip())
