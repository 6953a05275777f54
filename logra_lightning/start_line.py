"""What a run runs on, said in a line at its start, with what makes it slow without need."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from logra_lightning.strategy import tell_what_trains

# Packages that transformers takes for layers with a state, where they are installed.
_KERNELS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
_STATE = ("linear_attention", "mamba", "recurrent", "hybrid")


def tell_start(module: Any) -> None:
    """Log what a `PolicyModule` runs on and what it trains; called once its weights are placed."""
    trainer = module.trainer
    device = module.device
    rank_zero_info(what_runs(module.policy, module.engine, device, str(trainer.precision)))
    tell_what_trains(module.policy, trainer.strategy)
    for line in slow_without_need(device, str(trainer.precision)):
        rank_zero_info(line)


def what_runs(policy: Any, engine: object, device: torch.device, precision: str) -> str:
    """Device, precision, attention and engine, for example `runs: cpu (AMD EPYC, 2 threads), ...`.

    Args:
        policy: a `transformers` model.
        engine: what samples.
        device: where this process's weights are.
        precision: the Trainer's.
    """
    parts = [_device(device), precision, f"attention {policy.config._attn_implementation}"]
    kinds = getattr(policy.config.get_text_config(), "layer_types", None) or []
    if any(part in kind for kind in kinds for part in _STATE):
        found = [name for package, name in _KERNELS.items() if importlib.util.find_spec(package)]
        by = found[0] if found and device.type == "cuda" else "plain torch"
        parts.append(f"layers with a state by {by}")
    return f"runs: {', '.join(parts)}, engine {type(engine).__name__}"


def slow_without_need(device: torch.device, precision: str) -> Iterator[str]:
    """Lines on what is slower here than it must be, each with what to change."""
    if device.type != "cpu":
        return
    if precision.startswith("bf16") and not has_native_bf16():
        yield (
            f"This CPU computes bf16 in software, many times slower than fp32: set "
            f"trainer.precision=32-true in place of {precision}."
        )
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        yield (
            f"There is an NVIDIA GPU here that torch {torch.__version__} cannot use (it is built "
            f"for {built}), so this run trains on the CPU: install a torch that fits the driver."
        )


def has_native_bf16() -> bool:
    """Whether the CPU has instructions for bf16; true where torch cannot tell."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return True
    found = torch.cpu.get_capabilities()
    return any(there for name, there in found.items() if name.endswith("bf16"))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / (1 << 30)
        return f"{device} ({torch.cuda.get_device_name(device)}, {total:.1f} GiB)"
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        name = torch.cpu.get_capabilities().get("cpu_name", "CPU")
        return f"cpu ({name}, {torch.get_num_threads()} threads)"
    return str(device)
