"""Stretches of work that a signal must not leave half done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way = 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, `Preemption` raises nothing: what it would leave is not the state of any step."""
    global _under_way
    _under_way += 1
    try:
        yield
    finally:
        _under_way -= 1


def may_interrupt() -> bool:
    """Whether an exception from a signal handler would leave everything as it should be."""
    return _under_way == 0
