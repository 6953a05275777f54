"""Rollouts: engines that sample, rewards and advantages on what they sampled, microbatches."""

from logra_lightning.rollout.collect import collect, evaluate
from logra_lightning.rollout.engine import Engine, SyncedEngine
from logra_lightning.rollout.pack import pack
from logra_lightning.rollout.stats import rollout_stats
from logra_lightning.rollout.torch_engine import TorchEngine
from logra_lightning.rollout.vllm_engine import VLLMEngine
from logra_lightning.rollout.weights import PolicyWeight

__all__ = [
    "Engine",
    "PolicyWeight",
    "SyncedEngine",
    "TorchEngine",
    "VLLMEngine",
    "collect",
    "evaluate",
    "pack",
    "rollout_stats",
]
