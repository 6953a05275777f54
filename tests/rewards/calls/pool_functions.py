"""What the tests call in worker processes: nothing here imports torch."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time

from logra_lightning.rewards.calls.metric_log import log_metric


def do(what: object) -> object:
    """Does what it is told, good or bad."""
    match what:
        case "raise":
            raise KeyError("no such thing")
        case "hang":
            time.sleep(600)
        case "count":  # holds the lock of the interpreter all the while
            return 9**9**9
        case "exit":
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "grow":
            return len(bytearray(4 * 2**30))
        case "where":
            return os.getpid(), "torch" in sys.modules
        case "start another and hang":
            with open(os.environ["PID_FILE"], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
    return what


def reward(completion: str) -> float | str | None:
    """A number as text, or a misdeed; notes the length of the text."""
    log_metric("length", len(completion))
    if completion.replace(".", "").isdigit():
        return float(completion)
    return None if completion == "nothing" else str(do(completion))


def batched(completion: list[str]) -> list[float | None]:
    """The same for a batch."""
    log_metric("size", len(completion))
    return [float(text) if text.isdigit() else do(text) for text in completion]  # type: ignore[misc]


async def awaited(completion: str) -> float:
    """Sleeps as many tenths of a second as it is told."""
    log_metric("length", len(completion))
    await asyncio.sleep(float(completion) / 10)
    return float(completion)


class Prepared:
    """Knows in which process it was prepared."""

    process = 0

    def prepare(self) -> None:
        self.process = os.getpid()

    def __call__(self) -> tuple[int, int]:
        return self.process, os.getppid()


class Unloadable:
    """Pickled here, but not to be had elsewhere."""

    def __setstate__(self, state: object) -> None:
        raise ImportError("only in the test's process")

    def __getstate__(self) -> object:
        return {"a": 1}

    def __call__(self) -> None: ...
