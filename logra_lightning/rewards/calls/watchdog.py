"""`Watchdog`: interrupt a call that hangs in this process, or end the process if that fails."""

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

_GRACE_S = 30.0  # time for the exception to end the call, before the process is ended
_AGAIN_S = 1.0  # the alarm rings again every second, should code swallow the exception


class Watchdog:
    """Raises TimeoutError inside a call of the main thread that takes too long.

    An alarm (SIGALRM) raises it, which reaches Python loops, sleeps, waiting for a network, and the
    regular expressions of `re`. It cannot stop:

    - C code that never returns to the interpreter,
    - code that swallows the exception or sets alarms of its own,
    - a call in another thread than the main one,
    - anything on systems without alarms (Windows).

    In these cases the process ends half a minute later with exit code 1, after `faulthandler` has
    printed where each thread was.

    Args:
        seconds: the time that a call may take; None watches nothing.
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
        """A context in which one call is made and watched."""
        if self.seconds is None:
            yield
            return
        now = time.monotonic()
        if now >= self._armed + 1:  # once a second at most, because each arming starts a thread
            self._armed = now
            limit = self.seconds + 1 + _GRACE_S  # the call may begin a second after the arming
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM"):
            with self._alarm(self.seconds):
                yield
        else:
            yield

    @contextmanager
    def _alarm(self, seconds: float) -> Iterator[None]:
        others, _ = signal.getitimer(signal.ITIMER_REAL)
        if 0 < others <= seconds:  # an alarm that somebody else has set comes first
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
        if time.monotonic() >= self._deadline:  # not where the call has just ended
            raise TimeoutError(f"took longer than {self.seconds:g} s")
