"""Engines sample completions; those with weights of their own are kept up to date."""

from logra_lightning.engines.engine import Engine, SyncedEngine
from logra_lightning.engines.torch_engine import TorchEngine
from logra_lightning.engines.vllm_engine import VLLMEngine
from logra_lightning.engines.weights import PolicyWeight

__all__ = ["Engine", "PolicyWeight", "SyncedEngine", "TorchEngine", "VLLMEngine"]
