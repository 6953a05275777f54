"""Spares the garbage collector what imports left: most of a million objects that stay.

vLLM collects garbage five times in the life of an engine, with them half a second each. It also
freezes and unfreezes objects, which would undo this, so where this is imported it cannot.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys

_freeze = gc.freeze
atexit.register(gc.unfreeze)  # libraries look for leaks at the end
gc.freeze = gc.unfreeze = lambda: None

_VLLM = "vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.model_executor.models.llama"


def freeze_imports() -> None:
    """Let the garbage collector pass over all objects that there are now."""
    gc.collect()
    _freeze()


def import_vllm() -> None:
    """Import what an engine of the tiny models needs, and let the collector pass over it."""
    if not set(_VLLM) <= sys.modules.keys():
        for name in _VLLM:
            importlib.import_module(name)
        freeze_imports()
