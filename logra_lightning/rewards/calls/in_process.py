"""Calls in this process: plain functions one after the other, async ones all at the same time."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from logra_lightning.rewards.calls.metric_log import noting
from logra_lightning.rewards.calls.pool import Outcome
from logra_lightning.rewards.calls.watchdog import Watchdog


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine; objects with an async `__call__` count as async too."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def call_here(
    function: Callable[..., Any],
    calls: Sequence[Mapping[str, Any]],
    stop_at_error: bool,
    hang_s: float | None = None,
) -> list[Outcome]:
    """Call a plain function, one call after the other, and return the outcome of each.

    Args:
        function: any function that is not async.
        calls: the keyword arguments of each call.
        stop_at_error: whether to make no more calls after the first that raises; then fewer
            outcomes than calls are returned, and the last of them has the error.
        hang_s: time in seconds after which `Watchdog` interrupts a call; None waits for ever.
    """
    outcomes: list[Outcome] = []
    with Watchdog(hang_s) as watchdog:
        for arguments in calls:
            with noting() as noted:
                try:
                    with watchdog.call():
                        value = function(**arguments)
                    outcomes.append(Outcome(value, None, noted))
                except Exception as error:
                    outcomes.append(Outcome(None, error, noted))
                    if stop_at_error:
                        break
    return outcomes


def call_async(
    function: Callable[..., Coroutine[Any, Any, Any]],
    calls: Sequence[Mapping[str, Any]],
    timeout_s: float | None,
    hang_s: float | None = None,
) -> list[Outcome]:
    """Call an async function, all calls at the same time, and return the outcome of each.

    The calls run on an event loop that has its own thread and lives as long as this process. So
    what the function keeps between batches, such as an HTTP client, stays usable, and the caller
    may itself be on a running event loop.

    Args:
        function: an async function.
        calls: the keyword arguments of each call.
        timeout_s: time in seconds after which a call is cancelled; None waits for ever.
        hang_s: time in seconds: if no call has ended for so long, the unfinished calls are given
            up, even if one of them blocks the event loop. None waits for ever.
    """
    ended: dict[int, Outcome] = {}

    async def one(index: int, arguments: Mapping[str, Any]) -> None:
        with noting() as noted:
            try:
                value = await asyncio.wait_for(function(**arguments), timeout_s)
            except Exception as error:
                ended[index] = Outcome(None, error, noted)
            else:
                ended[index] = Outcome(value, None, noted)

    async def every() -> None:
        await asyncio.gather(*map(one, range(len(calls)), calls))

    running = asyncio.run_coroutine_threadsafe(every(), _LOOP.get())
    late = Outcome(error=TimeoutError(f"no call ended within {hang_s} s"))
    try:
        while True:
            before = len(ended)
            try:
                running.result(hang_s)
                break
            except TimeoutError:
                if len(ended) == before:
                    running.cancel()
                    break
        return [ended.get(index, late) for index in range(len(calls))]
    except BaseException:
        running.cancel()
        raise


class _Loop:
    """An event loop in a thread of its own, started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.process_id = 0

    def get(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None or self.process_id != os.getpid():  # threads do not survive a fork
                self.loop = asyncio.new_event_loop()
                self.process_id = os.getpid()
                threading.Thread(target=self.loop.run_forever, daemon=True, name="rewards").start()
            return self.loop


_LOOP = _Loop()
