"""Functions are recognised as async or not, and called to their outcome."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from logra_lightning.rewards.calls.in_process import call_async, call_here, is_async
from tests.rewards.calls.pool_functions import awaited


def plain(completion: str) -> float:
    return float(completion)


class Judge:
    async def __call__(self, completion: str) -> float:
        return float(completion)


def test_async_functions_are_recognised() -> None:
    assert all(
        map(is_async, (awaited, partial(awaited, completion="1"), Judge(), Judge().__call__))
    )
    assert not any(map(is_async, (plain, partial(plain), lambda: None, int, Judge)))


def test_calls_here_stop_at_an_error_or_go_on() -> None:
    calls = [{"completion": text} for text in ("1", "x", "2")]
    first, second = call_here(plain, calls, stop_at_error=True)
    assert (first.value, type(second.error)) == (1.0, ValueError)
    outcomes = call_here(plain, calls, stop_at_error=False)
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0]


def test_async_calls_without_a_limit_are_waited_for_and_stay_in_order() -> None:
    outcomes = call_async(awaited, [{"completion": text} for text in ("2", "1", "0")], None)
    assert [outcome.value for outcome in outcomes] == [2.0, 1.0, 0.0]
    assert [outcome.noted for outcome in outcomes] == [[("length", 1.0)]] * 3


def test_an_interrupt_cancels_what_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def long(completion: str) -> float:
        import asyncio

        try:
            await asyncio.sleep(600)
        finally:
            ended.append(completion)
        return 0.0

    def interrupt(self: object, timeout: float | None = None) -> None:
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call_async(long, [{"completion": "a"}], None)
    end = time.monotonic() + 10
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == ["a"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_async_calls_work_in_a_forked_process() -> None:
    call_async(awaited, [{"completion": "0"}], None)
    child = os.fork()
    if child == 0:
        outcomes = call_async(awaited, [{"completion": "1"}], None)
        os._exit(int(outcomes[0].value) + 40)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41
