"""Whoever waits for a vLLM core that is dead is told."""

from __future__ import annotations

import gc
import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from logra_lightning.engines.vllm_watch import names_death, wake_when_dead


class Client:
    """What vLLM's client has of a core in another process."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        self.utility_results: dict[int, Future[Any]] = {1: Future()}


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "vllm-watch"]


@pytest.mark.vllm
def test_waiting_calls_end_when_the_core_dies() -> None:
    exceptions = pytest.importorskip("vllm.v1.engine.exceptions")
    client = Client()
    wake_when_dead(client)
    (watch,) = watching()
    client.resources.engine_dead = True
    with pytest.raises(exceptions.EngineDeadError):
        client.utility_results[1].result(timeout=10)
    assert isinstance(client.outputs_queue.get(timeout=10), exceptions.EngineDeadError)
    client.utility_results[2] = Future()  # of a call that had not seen it
    with pytest.raises(exceptions.EngineDeadError):
        client.utility_results[2].result(timeout=10)
    watch.join(10)
    assert not watch.is_alive()


def test_a_watch_ends_with_its_engine() -> None:
    client = Client()
    wake_when_dead(client)
    (watch,) = watching()
    del client
    gc.collect()
    watch.join(10)
    assert not watch.is_alive()


def test_the_death_is_named_and_other_errors_are_left_alone() -> None:
    class EngineDeadError(Exception):
        pass

    @names_death
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(RuntimeError, match="vLLM's process died"):
        fail(EngineDeadError())
    with pytest.raises(ValueError, match="something else"):
        fail(ValueError("something else"))
