"""`log_metric`: numbers that a reward function notes beside the value it returns.

Imports nothing but the standard library, because the processes of `Pool` load this file by its
path, without the package around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[list[tuple[str, float]] | None] = ContextVar("reward_metrics", default=None)


def log_metric(name: str, value: float) -> None:
    """Note a number from inside a reward function; the function may be async or in another process.

    The mean of what a batch noted under one name is logged as `rewards/<reward>/<name>`. Nothing
    happens while no batch is being scored, for instance where you try the function by hand, nor in
    a thread that the function starts itself, unless that thread runs in a copy of the context.

    Args:
        name: last part of the metric's name in logs.
        value: a finite number.

    Raises:
        ValueError: if the value is not a finite number, also while no batch is being scored.
    """
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"log_metric({name!r}, {value!r}): the value must be a finite number")
    noted = _current.get()
    if noted is not None:
        noted.append((name, value))


@contextmanager
def noting() -> Iterator[list[tuple[str, float]]]:
    """A context with a list that gets the names and numbers noted inside it."""
    noted: list[tuple[str, float]] = []
    token = _current.set(noted)
    try:
        yield noted
    finally:
        _current.reset(token)
