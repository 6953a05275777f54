"""`log_metric`: what a reward function notes beside its value.

Standard library alone: the processes of `Pool` load this file by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[list[tuple[str, float]] | None] = ContextVar("reward_metrics", default=None)


def log_metric(name: str, value: float) -> None:
    """Note a number from inside a reward function, also an async one or one in another process.

    The mean of a batch's values is logged as `rewards/<label of the reward>/<name>`. Outside of
    scoring, as when the function is tried by hand, nothing happens. A thread that the function
    starts itself sees no scoring either, unless it is run in a copy of the context.

    Args:
        name: last part of the tag.
        value: a finite number.

    Raises:
        ValueError: another value, also outside of scoring.
    """
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"log_metric({name!r}, {value!r}): the value must be a finite number")
    noted = _current.get()
    if noted is not None:
        noted.append((name, value))


@contextmanager
def noting() -> Iterator[list[tuple[str, float]]]:
    """A list that receives what is noted inside."""
    noted: list[tuple[str, float]] = []
    token = _current.set(noted)
    try:
        yield noted
    finally:
        _current.reset(token)
