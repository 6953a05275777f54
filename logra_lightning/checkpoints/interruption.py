"""Marks work that a signal must not interrupt, because it would leave a state of no step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way = 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, `Preemption` does not interrupt the run; it may be entered again inside.

    It is for work that changes the policy for a while, such as computing with the reference's
    weights: a checkpoint saved in the middle would hold those.
    """
    global _under_way
    _under_way += 1
    try:
        yield
    finally:
        _under_way -= 1


def may_interrupt() -> bool:
    """Whether a signal handler may raise an exception now: nothing is inside `uninterrupted`."""
    return _under_way == 0
