"""Functions that the tests call in worker processes; the file imports no torch."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time

from logra_lightning.rewards.calls.metric_log import log_metric


def do(what: object) -> object:
    """Return the argument, unless it names a misdeed: then commit it."""
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
    """Score a text by the number it spells, or commit the misdeed it names; note its length."""
    log_metric("length", len(completion))
    if completion.replace(".", "").isdigit():
        return float(completion)
    return None if completion == "nothing" else str(do(completion))


def batched(completion: list[str]) -> list[float | None]:
    """Do for a batch of texts what `do` and numbers do for one; note the size of the batch."""
    log_metric("size", len(completion))
    return [float(text) if text.isdigit() else do(text) for text in completion]  # type: ignore[misc]


async def awaited(completion: str) -> float:
    """Sleep for as many tenths of a second as the text says; note its length."""
    log_metric("length", len(completion))
    await asyncio.sleep(float(completion) / 10)
    return float(completion)


class Prepared:
    """Tells in which process it was prepared, and the parent of the process that calls it."""

    process = 0

    def prepare(self) -> None:
        self.process = os.getpid()

    def __call__(self) -> tuple[int, int]:
        return self.process, os.getppid()


class Unloadable:
    """Can be pickled here, but not loaded in another process."""

    def __setstate__(self, state: object) -> None:
        raise ImportError("only in the test's process")

    def __getstate__(self) -> object:
        return {"a": 1}

    def __call__(self) -> None: ...
