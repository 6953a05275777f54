"""`Forker` and `Worker`: the processes of a `Pool`, as seen from the trainer."""

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

from logra_lightning.rewards.calls import metric_log
from logra_lightning.rewards.calls import pool_worker as wire

_START_LIMIT_S = 300.0  # for the callee's imports


class Forker:
    """A fresh Python process that loads the callee and forks workers, see `pool_worker`.

    Args:
        callee: a picklable object. Where it is of this package's rewards, its file is loaded
            without the package, which takes seconds to import.
        memory_gib: address space of each worker in GiB.

    Raises:
        ValueError: the callee could not be loaded there.
    """

    def __init__(self, callee: Any, memory_gib: float | None) -> None:
        alone = [metric_log]
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
        """A new worker.

        Raises:
            OSError, EOFError: the forker is gone.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self.control, [wire.REQUEST.pack(wire.FORK, 0)], [theirs.fileno()])
            (pid,) = wire.REPLY.unpack(self._read(wire.REPLY.size))
            return Worker(pid, Connection(ours.detach()), self)

    def end(self, pid: int) -> int:
        """Kill a worker and what it started; its status as `os.waitpid` gives it.

        Raises:
            OSError, EOFError: the forker is gone, and with it the worker.
        """
        self.control.sendall(wire.REQUEST.pack(wire.END, pid))
        (status,) = wire.REPLY.unpack(self._read(wire.REPLY.size))
        return int(status)

    def close(self) -> None:
        """End it; it kills its workers when its connection closes."""
        self.control.close()
        if self.owner != os.getpid():  # in a forked copy: the process is its parent's
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
    """One process that answers calls.

    Args:
        pid: its process.
        connection: for calls and values.
        forker: whose child it is.
    """

    pid: int
    connection: Connection
    forker: Forker

    def end(self) -> str:
        """Kill it, if it is not dead; how it ended, in words."""
        self.connection.close()
        try:
            status = self.forker.end(self.pid)
        except (OSError, EOFError):
            return "with the process that forked it"
        if os.WIFSIGNALED(status):
            return f"by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"with exit status {os.waitstatus_to_exitcode(status)}"


def pickled(callee: Any) -> bytes:
    """Its pickle, which another process can load.

    Raises:
        ValueError: there is none.
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
