"""`Forker` and `Worker`: the trainer's handles on the processes of a `Pool`."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from logra_lightning.rewards import thinking
from logra_lightning.rewards.calls import metric_log
from logra_lightning.rewards.calls import pool_worker as wire

_START_LIMIT_S = 300.0  # in which the forker must have imported the callee


class Forker:
    """A fresh Python process that loads the callee once and forks workers (see `pool_worker`).

    Args:
        callee: a picklable object. If its module belongs to `logra_lightning.rewards`, that file is
            loaded by its path, because importing the package takes seconds.
        memory_gib: address space of each worker in GiB; None sets no limit.

    Raises:
        ValueError: if the process could not load the callee.
    """

    def __init__(self, callee: Any, memory_gib: float | None) -> None:
        alone = [metric_log, thinking]  # what these files import of the package
        name = str(getattr(callee, "__module__", ""))
        if name.startswith("logra_lightning.rewards."):
            alone.append(sys.modules[name])
        order = pickle.dumps(
            {
                "path": sys.path,
                "alone": [(module.__name__, module.__file__) for module in alone],
                "callee": pickled(callee),
                "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
            }
        )
        self.control, theirs = socket.socketpair()
        self.owner = os.getpid()
        script = str(Path(wire.__file__).resolve())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", script, str(theirs.fileno()), str(self.owner)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        try:
            self.control.settimeout(_START_LIMIT_S)
            self.control.sendall(wire.LENGTH.pack(len(order)) + order)
            (size,) = wire.LENGTH.unpack(self._read(wire.LENGTH.size))
            problem = self._read(size).decode()
        except BaseException:
            self.close()
            raise
        if problem:
            self.close()
            raise ValueError(f"{callee!r} cannot be loaded by another process:\n{problem}")

    def fork(self) -> Worker:
        """Start a new worker.

        Raises:
            OSError, EOFError: if the forker is gone.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self.control, [wire.REQUEST.pack(wire.FORK, 0)], [theirs.fileno()])
            (pid,) = wire.REPLY.unpack(self._read(wire.REPLY.size))
            return Worker(pid, Connection(ours.detach()), self)

    def end(self, pid: int) -> int:
        """Kill a worker with all that it started; return its status as `os.waitpid` gives it.

        Raises:
            OSError, EOFError: if the forker is gone, and the worker with it.
        """
        self.control.sendall(wire.REQUEST.pack(wire.END, pid))
        (status,) = wire.REPLY.unpack(self._read(wire.REPLY.size))
        return int(status)

    def close(self) -> None:
        """End the forker, which kills its workers as soon as its connection is closed."""
        self.control.close()
        if self.owner != os.getpid():  # in a fork: waiting for the forker is for its parent
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self, size: int) -> bytes:
        data = wire.receive(self.control, size)
        if len(data) < size:
            raise EOFError("the process that forks the workers is gone")
        return data


@dataclass(frozen=True)
class Worker:
    """A process that answers calls.

    Args:
        pid: its process number.
        connection: carries the calls to it and its answers back.
        forker: the process that forked it.
    """

    pid: int
    connection: Connection
    forker: Forker

    def end(self) -> str:
        """Kill the worker unless it is dead already; return in words how it ended."""
        self.connection.close()
        try:
            status = self.forker.end(self.pid)
        except (OSError, EOFError):
            return "with the process that forked it"
        if os.WIFSIGNALED(status):
            return f"by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"with exit status {os.waitstatus_to_exitcode(status)}"


def pickled(callee: Any) -> bytes:
    """Pickle the callee for another process.

    Raises:
        ValueError: if it cannot be pickled, or only the script that was started can load it.
    """
    try:
        data = pickle.dumps(callee)
    except Exception as error:
        raise ValueError(
            f"{callee!r} is called in other processes, which must be able to import it, but it "
            f"cannot be pickled ({error}): define it at the top of a module"
        ) from error
    if b"__main__" in data:
        raise ValueError(
            f"{callee!r} is called in other processes, which cannot import from the script that "
            f"was started (__main__): define it in a module of its own"
        )
    return data
