"""What a reward notes is gathered for the call that is going on, and for no other."""

from __future__ import annotations

import contextvars
import threading

import pytest

from logra_lightning.rewards import log_metric
from logra_lightning.rewards.calls.metric_log import noting


def test_notes_go_to_the_innermost_call() -> None:
    with noting() as outer:
        log_metric("a", 1)
        with noting() as inner:
            log_metric("b", True)
        log_metric("a", 3)
    assert outer == [("a", 1.0), ("a", 3.0)]
    assert inner == [("b", 1.0)]


def test_nothing_happens_outside_of_scoring() -> None:
    log_metric("a", 1.0)
    with noting() as noted:
        pass
    log_metric("a", 2.0)
    assert noted == []


def test_a_thread_notes_where_it_runs_in_a_copy_of_the_context() -> None:
    with noting() as noted:
        context = contextvars.copy_context()
        for note in (lambda: log_metric("a", 1), lambda: context.run(log_metric, "b", 2)):
            thread = threading.Thread(target=note)
            thread.start()
            thread.join()
    assert noted == [("b", 2.0)]


def test_what_is_no_number_is_refused() -> None:
    with noting(), pytest.raises(ValueError, match="could not convert"):
        log_metric("a", "much")  # type: ignore[arg-type]
    for value in (float("nan"), float("inf")):
        with noting(), pytest.raises(ValueError, match="must be a finite number"):
            log_metric("a", value)
