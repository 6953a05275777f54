"""`Watchdog`: what hangs in this process is interrupted, and if that does not help, ends it."""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

_GRACE_S = 30.0  # for the exception to end the call
_AGAIN_S = 1.0


class Watchdog:
    """Raises TimeoutError in a call of the main thread that takes too long.

    It comes from the handler of an alarm (SIGALRM), which Python runs in loops, sleeps, waits for a
    network, and in `re` too. It does not reach code in C that never lets Python look, code that
    swallows the exception or has alarms of its own, and other threads than the main one: half a
    minute later the process ends with exit code 1 and prints where each thread was
    (`faulthandler`). So it does without alarms (Windows).

    Args:
        seconds: that a call may take; None watches nothing.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._deadline = math.inf
        self._armed = -math.inf

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context in which one call is made."""
        if self.seconds is None:
            yield
            return
        now = time.monotonic()
        if now >= self._armed + 1:  # not for each of many short calls: it starts a thread
            self._armed = now
            limit = self.seconds + 1 + _GRACE_S
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM"):
            with self._alarm(self.seconds):
                yield
        else:
            yield

    @contextmanager
    def _alarm(self, seconds: float) -> Iterator[None]:
        others, _ = signal.getitimer(signal.ITIMER_REAL)
        if 0 < others <= seconds:  # somebody's alarm comes first
            yield
            return
        start = time.monotonic()
        self._deadline = start + seconds
        before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        try:
            yield
        finally:
            self._deadline = math.inf
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
            if others:
                left = others - (time.monotonic() - start)
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._deadline:  # and not just after the end of the call
            raise TimeoutError(f"took longer than {self.seconds:g} s")
