"""Ends calls that wait for a vLLM process which has died; otherwise they would wait for ever."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_POLL_S = 1.0


def wake_when_dead(client: Any) -> None:
    """Raise `EngineDeadError` in calls that wait for a vLLM core in another process, if it dies.

    vLLM notices the death and refuses later calls, but a call that already waits goes on waiting.
    A thread watches, and ends when the engine has been closed.

    Args:
        client: the engine's `SyncMPClient`, which is `llm.llm_engine.engine_core`.
    """
    reference = weakref.ref(client)
    threading.Thread(target=_watch, args=(reference,), name="vllm-watch", daemon=True).start()


def _watch(reference: weakref.ref[Any]) -> None:
    was_dead = False
    while (client := reference()) is not None:
        is_dead = client.resources.engine_dead
        if is_dead:
            _wake(client)
        if was_dead:  # woken a second time, for a call that began in between
            return
        was_dead = is_dead
        del client
        time.sleep(_POLL_S)


def _wake(client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    client.outputs_queue.put_nowait(EngineDeadError())
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())


def names_death(method: F) -> F:
    """Make `method` raise a RuntimeError that says in one line that vLLM died, and what to do."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "EngineDeadError":
                raise
            raise RuntimeError(
                "vLLM's process died, perhaps killed for want of memory (lower model.engine."
                "init_args.gpu_memory_utilization, or kv_cache_memory_bytes): see its output "
                "above; the run can be resumed with ckpt_path=last"
            ) from error

    return wrapped  # type: ignore[return-value]
