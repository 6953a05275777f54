"""A call that hangs is interrupted; where that does not help, its process ends and says where."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from logra_lightning.rewards.calls import watchdog
from logra_lightning.rewards.calls.watchdog import Watchdog


def backtrack() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(60)


@pytest.mark.parametrize("hang", [backtrack, spin, sleep])
def test_regular_expressions_loops_and_sleeps_are_interrupted(hang: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    with (
        pytest.raises(TimeoutError, match=r"took longer than 0\.3 s"),
        Watchdog(0.3) as dog,
        dog.call(),
    ):
        hang()
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGALRM) == before


def test_time_counts_for_each_call_alone() -> None:
    with Watchdog(0.6) as dog:
        for _ in range(4):
            with dog.call():
                time.sleep(0.3)
        time.sleep(0.8)  # between calls nothing is watched


@pytest.fixture
def alarmed() -> Iterator[list[int]]:
    """Signals that reach somebody else's handler; pytest-timeout's own alarm waits meanwhile."""
    came: list[int] = []
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda signum, _: came.append(signum))
    yield came
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_an_alarm_of_somebody_else_comes_when_it_should(alarmed: list[int]) -> None:
    for later in (False, True):
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with Watchdog(0.6 if later else 0.3) as dog, dog.call():
            time.sleep(0.2)
        assert not alarmed
        time.sleep(0.3)
        assert alarmed == [signal.SIGALRM]
        alarmed.clear()


def test_without_a_limit_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with Watchdog(None) as dog, dog.call():
        assert signal.getsignal(signal.SIGALRM) == before


STUCK = """
import importlib.util, itertools
spec = importlib.util.spec_from_file_location("watchdog", "{}")  # without torch
watchdog = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watchdog)
watchdog._GRACE_S = 0.5
def reward_in_c():
    sum(itertools.repeat(0))
def reward_that_goes_on():
    while True:
        try:
            while True:
                pass
        except Exception:
            pass
with watchdog.Watchdog(0.5) as dog, dog.call():
    {}()
"""


@pytest.mark.faults
@pytest.mark.parametrize("function", ["reward_in_c", "reward_that_goes_on"])
def test_what_cannot_be_interrupted_ends_the_process_and_is_named(function: str) -> None:
    script = STUCK.format(watchdog.__file__, function)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert f"in {function}" in done.stderr
