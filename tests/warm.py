"""Programs that start without their imports: forked from a process that has made them.

`warm.begin("tests.faults.fault_run", "FOLDER", output=path)` stands for `python -m
tests.faults.fault_run FOLDER > path`: the program has a process, a session and a `__main__` of its
own, default signal handlers, and ends as any Python does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.heap import freeze_imports

ROOT = Path(__file__).parent.parent
SLOW_IMPORTS = (
    "datasets",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "logra_lightning.cli",
    "logra_lightning.engines.torch_engine",
    "tests.split_runs",
)


class Program:
    """A process that the warm one forked; what it prints is in the file `output`."""

    def __init__(self, connection: socket.socket, output: Path) -> None:
        self._connection = connection
        self.output = output
        message = connection.recv(32)
        assert message, "the warm process is gone; what it printed is among the output of the tests"
        self.pid = int(message)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return code, negative for a signal; None while it runs."""
        return self.wait(0)

    def wait(self, seconds: float) -> int | None:
        """The same after at most so many seconds."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(self._connection.recv(32))
            self._connection.close()
        return self.returncode

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until it has printed a text."""
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text():
            if self.wait(0.05) is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{text!r} never came:\n{self.output.read_text()}")

    def finish(self, seconds: float = 60) -> tuple[int, str]:
        """Return code and all that it printed."""
        if self.wait(seconds) is None:
            self.kill()
            raise AssertionError(f"it did not end in {seconds} s:\n{self.output.read_text()}")
        assert self.returncode is not None
        return self.returncode, self.output.read_text()

    def kill(self) -> None:
        """Kill it and what it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(10)


class Warm:
    """The process that forks; it ends, and what it forked with it, when this one does."""

    def __init__(self, **environment: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
            )

    def begin(
        self,
        what: str | Callable[..., None],
        *args: Any,
        output: Path,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Start a program.

        Args:
            what: the name of a module as for `python -m`, the path of a script, or a function at
                the top of a module.
            args: arguments on the command line, or the function's, pickled.
            output: file for what it prints; emptied first.
            cwd: its working directory.
            environment: variables to set beside those of this process.
        """
        output.write_text("")
        order = pickle.dumps((what, args, str(output), str(cwd), environment or {}))
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [order], [theirs.fileno()])
        return Program(mine, output)

    def close(self) -> None:
        """End it and all that still runs."""
        self._control.close()
        self._process.wait(30)


def serve(control: socket.socket) -> bytes | None:
    """Fork on each order. Returns the order in the new process, and None when no more will come."""
    running: dict[int, tuple[int, socket.socket]] = {}  # pid and its reader, by its pidfd
    while True:
        for ready in select.select([control.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, connection = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection, suppress(BrokenPipeError):
                    connection.send(str(code).encode())
                continue
            order, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
            if not order:
                for pid, _ in running.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            connection = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                os.setsid()
                control.close()
                connection.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    other.close()
                return order
            running[os.pidfd_open(pid)] = (pid, connection)
            connection.send(str(pid).encode())


def follow(order: bytes) -> None:
    """Be the program that was ordered."""
    what, args, output, cwd, environment = pickle.loads(order)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.modules["torch"].set_num_threads(1)  # renews the pool of threads, which a fork breaks
    if callable(what):
        what(*args)
        return
    sys.argv = [what, *args]
    if what.endswith(".py"):
        sys.path[0] = str(Path(what).parent)
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    freeze_imports()
    if order := serve(socket.socket(fileno=int(sys.argv[1]))):
        follow(order)
