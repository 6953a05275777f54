"""Two processes that train together, started once, for tests that call functions in both of them.

    def total(value: float) -> float:  # in a test file; runs in both processes
        return sum_over_processes_(torch.tensor(value + process_index())).item()

    def test_it(two_processes: TwoProcesses) -> None:
        assert two_processes.run(total, 2.0) == [5.0, 5.0]

They have the environment that torchrun gives, and one gloo group for as long as they live.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from tests.warm import Program, Warm

GRACE_S = 10.0  # for the other process, once one has failed


class TwoProcesses:
    """Starts the processes when first asked, and new ones where a call left them unusable."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self._warm, self._folder = warm, folder
        self._programs: list[Program] = []
        self._connections: list[Connection] = []
        self._starts = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 200) -> list[Any]:
        """Call a function in both processes at once.

        Args:
            function: a function at the top of a module.
            args: what it is called with, pickled.
            timeout: seconds after which both processes are killed.

        Returns:
            What it returned in process 0 and in process 1.

        Raises:
            AssertionError: in one of them it raised, died or hung; with traceback and output.
        """
        if not self._programs:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, args)))
        results: list[Any] = [None, None]
        errors: list[str | None] = ["hangs", "hangs"]
        waiting, end = list(self._connections), time.monotonic() + timeout
        while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
            for connection in ready:
                process = self._connections.index(connection)
                try:
                    results[process], errors[process] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    errors[process] = "died"
                if errors[process]:
                    end = min(end, time.monotonic() + GRACE_S)
                waiting.remove(connection)
        if any(errors):
            # They may wait for different things now, so the next call gets new ones.
            outputs = [program.output for program in self._programs]
            self.close()
            parts = []
            for process, output in enumerate(outputs):
                parts.append(f"process {process} {errors[process] or 'returned'}")
                parts.append(f"and printed\n{output.read_text()[-6000:]}")
            raise AssertionError("\n".join(parts))
        return results

    def _start(self) -> None:
        self._starts += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = str(self._folder / f"calls{self._starts}")
        found = {}
        with Listener(address, "AF_UNIX") as listener:
            for process in (0, 1):
                self._programs.append(
                    self._warm.begin(
                        "tests.two_processes",
                        address,
                        output=self._folder / f"process{process}_start{self._starts}.txt",
                        environment=environment(process, port),
                    )
                )
            for _ in (0, 1):
                connection = listener.accept()
                found[connection.recv()] = connection
        self._connections = [found[process] for process in (0, 1)]

    def close(self) -> None:
        """End both; those that do not end at once say where they are."""
        for connection in self._connections:
            connection.close()
        for program in self._programs:
            if program.wait(2.0) is None:
                os.kill(program.pid, signal.SIGABRT)
                program.wait(2.0)
                program.kill()
        self._programs, self._connections = [], []


def environment(process: int, port: int) -> dict[str, str]:
    """What `torchrun --nproc-per-node=2` sets and Lightning reads."""
    index = dict.fromkeys(("RANK", "LOCAL_RANK"), str(process))
    size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return index | size | address | {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}


def answer_calls(address: str) -> None:
    """What each of the two processes does: answers calls until the tests hang up."""
    faulthandler.enable()
    torch.distributed.init_process_group("gloo")
    kept = dict(os.environ)
    with Client(address) as connection:
        connection.send(torch.distributed.get_rank())
        with suppress(EOFError):
            while True:
                order = connection.recv_bytes()
                try:
                    function, args = pickle.loads(order)
                    answer = pickle.dumps((function(*args), None))
                except BaseException:
                    answer = pickle.dumps((None, f"raised\n{traceback.format_exc()}"))
                os.environ.clear()
                os.environ.update(kept)
                connection.send_bytes(answer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    answer_calls(sys.argv[1])
