"""Engines sample completions; those with weights of their own are kept equal to the policy."""

from logra_lightning.engines.engine import Engine, SyncedEngine
from logra_lightning.engines.sync_modes import DenseSync, FactorSync, SharedSync, SyncMode
from logra_lightning.engines.torch_engine import TorchEngine
from logra_lightning.engines.vllm_engine import VLLMEngine
from logra_lightning.engines.weights import PolicyWeight

__all__ = [
    "DenseSync",
    "Engine",
    "FactorSync",
    "PolicyWeight",
    "SharedSync",
    "SyncMode",
    "SyncedEngine",
    "TorchEngine",
    "VLLMEngine",
]
