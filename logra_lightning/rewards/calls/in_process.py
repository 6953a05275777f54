"""How a reward's function is called: here, on an event loop, or in a pool of processes."""

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
    """Whether calling it gives a coroutine; also of objects with an async `__call__`."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def call_here(
    function: Callable[..., Any],
    calls: Sequence[Mapping[str, Any]],
    stop_at_error: bool,
    hang_s: float | None = None,
) -> list[Outcome]:
    """The outcome of each call, one after the other.

    Args:
        function: a plain function.
        calls: keyword arguments of each.
        stop_at_error: leave out the calls after one that raises.
        hang_s: seconds after which a call is interrupted, as far as `Watchdog` can; None waits.
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
    """The outcome of each call, all of them running at the same time.

    They run on one event loop in a thread of its own, which lives as long as this process: clients
    that the function keeps between batches stay usable, and the caller may have a running loop.

    Args:
        function: an async function.
        calls: keyword arguments of each.
        timeout_s: seconds after which a call is cancelled; None waits.
        hang_s: seconds without the end of any call, after which the others are given up; also
            where one of them blocks the loop. None waits.
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
    """An event loop that runs in a thread, started when first asked for."""

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
