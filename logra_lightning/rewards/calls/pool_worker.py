"""The forker and the workers of a `Pool`, as they run in processes of their own.

The forker runs this file as a script. It loads the callee once and then forks a worker whenever the
trainer asks for one, so a killed worker is replaced in milliseconds. The file imports nothing but
the standard library: neither torch nor the trainer's `__main__` gets into these processes.

The forker has one thread and makes no call of the callee's methods but `prepare`, so nothing can
keep it from noticing that the trainer is gone. It then kills its workers and ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import operator
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

REQUEST = struct.Struct("!ci")  # FORK or END, and the number of the process to end
REPLY = struct.Struct("!i")  # the number of the new process, or the exit status of the ended one
LENGTH = struct.Struct("!q")  # bytes of the message that follows
FORK, END = b"F", b"E"
_PR_SET_PDEATHSIG = 1


def receive(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes; fewer only if the other side is gone."""
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def load_alone(name: str, path: str) -> Any:
    """Import one file as the module `name`, without importing the packages it belongs to."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Unpickler(pickle.Unpickler):
    """Finds classes in modules that `load_alone` has loaded, without importing their packages."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a pickle names."""
        if module in sys.modules:
            return operator.attrgetter(name)(sys.modules[module])
        return super().find_class(module, name)


def main() -> None:
    """Load the callee that the trainer sends, report whether that worked, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    trainer = int(sys.argv[2])
    (size,) = LENGTH.unpack(receive(control, LENGTH.size))
    order = pickle.loads(receive(control, size))
    sys.path[:] = order["path"]
    modules: list[Any] = []
    try:
        modules += [load_alone(name, path) for name, path in order["alone"]]
        callee = Unpickler(io.BytesIO(order["callee"])).load()
        getattr(callee, "prepare", lambda: None)()
        problem = b""
    except BaseException:
        problem = traceback.format_exc().encode()
    control.sendall(LENGTH.pack(len(problem)) + problem)
    if not problem:
        serve(control, trainer, callee, order["memory_bytes"], modules[0].noting)


def serve(
    control: socket.socket, trainer: int, callee: Any, memory_bytes: int | None, noting: Any
) -> None:
    """Fork and end workers until the trainer closes its side or dies."""
    waiter = select.poll()
    waiter.register(control, select.POLLIN)
    alive: int | None = None
    with suppress(AttributeError, OSError):  # systems without it look for the trainer every second
        alive = os.pidfd_open(trainer)
        waiter.register(alive, select.POLLIN)
    workers: set[int] = set()
    while os.getppid() == trainer:
        ready = [fd for fd, _ in waiter.poll(None if alive is not None else 1000)]
        if alive in ready:
            break
        if not ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 1)
        if not message:
            break
        operation, pid = REQUEST.unpack(message)
        if operation == FORK:
            pid = os.fork()
            if pid == 0:
                control.close()
                if alive is not None:
                    os.close(alive)
                work(fds[0], callee, memory_bytes, noting)
            os.close(fds[0])
            workers.add(pid)
            control.sendall(REPLY.pack(pid))
        else:
            workers.discard(pid)
            control.sendall(REPLY.pack(end(pid)))
    for pid in workers:
        end(pid)


def end(pid: int) -> int:
    """Kill a worker with all that it started; return its status as `os.waitpid` gives it."""
    for kill in (os.killpg, os.kill):  # a new worker may not lead a process group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def work(fd: int, callee: Any, memory_bytes: int | None, noting: Any) -> None:
    """Run a worker: answer calls until the trainer closes the connection, then exit."""
    status = 1
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if memory_bytes is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        connection = Connection(fd)
        while True:
            connection.send_bytes(answer(callee, connection.recv_bytes(), noting))
    except (EOFError, ConnectionError):
        status = 0
    finally:
        os._exit(status)


def answer(callee: Any, message: bytes, noting: Any) -> bytes:
    """Make one call; return the pickle of its value or its error, and of what it noted."""
    with noting() as noted:
        try:
            method, arguments = pickle.loads(message)
            return pickle.dumps((getattr(callee, method)(**arguments), None, noted))
        except BaseException as error:
            problem = (f"{type(error).__name__}: {error}", traceback.format_exc())
            return pickle.dumps((None, problem, noted))


if __name__ == "__main__":
    main()
