"""What vLLM says when it does not start, in one line that names what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OPTION = "model.engine.init_args"
_TORCH_ENGINE = "set model.engine to logra_lightning.engines.TorchEngine"


@contextmanager
def one_line_refusals(architecture: str, options: dict[str, Any]) -> Iterator[None]:
    """Turn the refusals of vLLM's start that are known into a ValueError of one line.

    Args:
        architecture: name of the policy's class.
        options: options of `vllm.LLM`.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        known = _known(str(error), architecture, options)
        if known is None:
            raise
        raise ValueError(known) from error


def _known(text: str, architecture: str, options: dict[str, Any]) -> str | None:
    if "Model architectures" in text:
        said = _line_with("Model architectures", text)
        return f"vLLM does not serve {architecture} here ({said}): {_TORCH_ENGINE}"
    if "Free memory on device" in text:
        share = options["gpu_memory_utilization"]
        return (
            f"vLLM wants {share} of the GPU{_memory(share)}: lower {_OPTION}.gpu_memory_utilization"
            f", set {_OPTION}.kv_cache_memory_bytes, or let the trainer hold less "
            f"(model.memory.activation_checkpointing, trainer.precision=bf16-true)"
        )
    for key in ("cache blocks", "KV cache"):
        if key in text:
            return (
                f"vLLM has no room for its key-value cache beside the weights{_memory(None)} "
                f"({_line_with(key, text)}): raise {_OPTION}.gpu_memory_utilization or "
                f"{_OPTION}.kv_cache_memory_bytes, or lower {_OPTION}.max_model_len"
            )
    return None


def _memory(share: float | None) -> str:
    """How much of the GPU is free, and how much is asked for; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info())
    held = torch.cuda.memory_reserved() / (1 << 30)
    asked = "" if share is None else f", {share * total:.1f} GiB"
    return f"{asked}, but {free:.1f} of {total:.1f} GiB are free, and the trainer holds {held:.1f}"


def _line_with(key: str, text: str) -> str:
    """The sentence of vLLM's message that has the key."""
    line = next(line for line in text.splitlines() if key in line)
    return line.strip().split(". ")[0].rstrip(".")
