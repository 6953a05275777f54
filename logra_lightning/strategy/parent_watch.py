"""Ends a process whose parent is gone: rank 0 is nobody's child, so nobody else would notice."""

from __future__ import annotations

import os
import sys
import threading
import time

_SECONDS = 1.0
_GRACE_S = 10.0  # where rank 0 ended well, this process has its own end to come to


def exit_with_parent() -> None:
    """End this process soon after its parent, even where it waits for other ranks."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    time.sleep(_GRACE_S)
    print(f"rank 0 (process {parent}) is gone: process {os.getpid()} ends", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # no clean-up, which may wait for the ranks that are gone
