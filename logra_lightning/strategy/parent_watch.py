"""Ends a process that process 0 has started, when process 0 is gone.

Nobody watches process 0 itself: where it is killed, the others would wait for it for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time

_SECONDS = 1.0
_GRACE_S = 10.0  # process 0 may have ended well, and then this one is about to end by itself


def exit_with_parent() -> None:
    """End this process soon after its parent, even while it waits for other processes."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    time.sleep(_GRACE_S)
    print(f"process 0 (pid {parent}) is gone: pid {os.getpid()} ends", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # no clean-up: it might wait for processes that are gone
