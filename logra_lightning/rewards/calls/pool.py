"""`Pool`: calls in worker processes, with a time limit that no call can overrun."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from logra_lightning.rewards.calls.pool_process import Forker, Worker, pickled


@dataclass(frozen=True)
class Outcome:
    """How one call ended.

    Args:
        value: what the call returned; None if it did not return.
        error: the exception that the call raised, in this process or another; a TimeoutError if it
            overran its limit; None if it returned.
        noted: names and values that the call passed to `log_metric`.
    """

    value: Any = None
    error: Exception | None = None
    noted: list[tuple[str, float]] = field(default_factory=list)


class Pool:
    """Worker processes that call the methods of one object, the callee.

    A worker is killed when its call overruns the limit, and a new one takes its place within
    milliseconds. The workers start at the first call and are kept between batches. They end with
    `close()`, when the pool is garbage collected, or when this process ends, even by `kill -9`.

    The workers are forked from a fresh Python process, the forker, which has loaded the callee and
    called its `prepare()` if it has one. So they inherit nothing of this process's CUDA state,
    threads or `__main__`. Needs a POSIX system.

    Neither pebble nor loky can replace it: each of their new workers imports the callee anew, and
    a worker in the middle of a call lives on when this process is killed.

    Args:
        callee: a picklable object whose class other processes can import.
        workers: the most worker processes at a time; by default the number of cores, at most 8.
        memory_gib: address space of each worker, in GiB; a call that needs more gets a MemoryError.

    Raises:
        ValueError: if no other process can load the callee, or a number is out of range.
    """

    def __init__(
        self, callee: Any, workers: int | None = None, memory_gib: float | None = None
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.workers = min(8, cores or 1) if workers is None else workers
        if self.workers < 1 or (memory_gib is not None and memory_gib <= 0):
            raise ValueError(
                f"a pool needs at least one worker and memory above 0, got {self.workers} workers "
                f"and {memory_gib} GiB"
            )
        if not hasattr(os, "fork"):
            raise ValueError(f"time limits need os.fork, which {sys.platform} does not have")
        self.callee = callee
        self.memory_gib = memory_gib
        pickled(callee)
        self._reset()

    def map(
        self,
        calls: Sequence[Mapping[str, Any]],
        timeout_s: float,
        *,
        method: str = "__call__",
        total_s: float | None = None,
    ) -> list[Outcome]:
        """Make all calls and return their outcomes in the same order.

        Any thread may use it; a second thread waits until the first one's calls have ended.

        Args:
            calls: the keyword arguments of each call.
            timeout_s: the time that one call may take, in seconds.
            method: name of the callee's method.
            total_s: the time that all calls together may take, in seconds; then those that still
                run are killed and the rest is not begun. None sets no such limit.
        """
        if not calls:
            return []
        if self._process_id != os.getpid():  # in a fork, the lock and workers are its parent's
            self._reset()
        with self._lock:
            return self._map(calls, timeout_s, method, total_s)

    def close(self) -> None:
        """End all worker processes; a later `map` starts new ones."""
        with self._lock:
            self._end_all()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._process_id = os.getpid()
        self._forker: Forker | None = None
        self._finalizer: weakref.finalize | None = None
        self._idle: list[Worker] = []

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in self.__dict__.items() if not n.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _map(
        self,
        calls: Sequence[Mapping[str, Any]],
        timeout_s: float,
        method: str,
        total_s: float | None,
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome()] * len(calls)
        waiting = deque(range(len(calls)))
        running: dict[Connection, tuple[int, Worker, float]] = {}
        self._start()  # before the clock starts: the callee's imports count towards no limit
        last = time.monotonic() + total_s if total_s is not None else float("inf")
        late = f"took longer than {timeout_s:g} s"
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    index = waiting.popleft()
                    if time.monotonic() >= last:
                        outcomes[index] = Outcome(error=TimeoutError("no time was left for it"))
                        continue
                    try:
                        message = pickle.dumps((method, dict(calls[index])))
                        worker = self._send(message)
                    except (pickle.PicklingError, AttributeError, TypeError) as error:
                        outcomes[index] = Outcome(error=error)
                        continue
                    limit = min(time.monotonic() + timeout_s, last)
                    running[worker.connection] = (index, worker, limit)
                if not running:
                    continue
                first = min(limit for _, _, limit in running.values())
                ready = wait(list(running), max(0.0, first - time.monotonic()))
                now = time.monotonic()
                for connection, (index, worker, limit) in list(running.items()):
                    if connection in ready:
                        outcomes[index] = self._receive(worker)
                    elif limit <= now:
                        worker.end()
                        outcomes[index] = Outcome(error=TimeoutError(late))
                    else:
                        continue
                    del running[connection]
        except BaseException:
            self._end_all()
            raise
        return outcomes

    def _start(self) -> Forker:
        if self._forker is None:
            self._forker = Forker(self.callee, self.memory_gib)
            self._finalizer = weakref.finalize(self, self._forker.close)
        return self._forker

    def _send(self, message: bytes) -> Worker:
        """Give a call to an idle worker that still lives, or to a new one."""
        while self._idle:
            worker = self._idle.pop()
            try:
                worker.connection.send_bytes(message)
                return worker
            except ConnectionError:
                worker.end()
        try:
            worker = self._start().fork()
        except (OSError, EOFError):  # somebody has killed the forker
            self._end_all()
            worker = self._start().fork()
        worker.connection.send_bytes(message)
        return worker

    def _receive(self, worker: Worker) -> Outcome:
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, ConnectionError):
            return Outcome(error=RuntimeError(f"its process died {worker.end()}"))
        self._idle.append(worker)
        try:
            value, problem, noted = pickle.loads(message)
        except Exception as unreadable:
            return Outcome(error=unreadable)
        if problem is None:
            return Outcome(value, None, noted)
        error = RuntimeError(problem[0])
        error.add_note(problem[1])
        return Outcome(error=error, noted=noted)

    def _end_all(self) -> None:
        for worker in self._idle:
            worker.connection.close()
        self._idle = []
        self._forker = None
        if self._finalizer is not None:
            self._finalizer()
