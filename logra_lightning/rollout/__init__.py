"""Rollouts: engines that sample, rewards and advantages on what they sampled, microbatches."""

from logra_lightning.rollout.collect import DynamicSampling, Sampler, collect, evaluate
from logra_lightning.rollout.engine import Engine, SyncedEngine
from logra_lightning.rollout.packing import in_step, minibatches, pack
from logra_lightning.rollout.stats import rollout_stats
from logra_lightning.rollout.torch_engine import TorchEngine
from logra_lightning.rollout.vllm_engine import VLLMEngine
from logra_lightning.rollout.weights import PolicyWeight

__all__ = [
    "DynamicSampling",
    "Engine",
    "PolicyWeight",
    "Sampler",
    "SyncedEngine",
    "TorchEngine",
    "VLLMEngine",
    "collect",
    "evaluate",
    "in_step",
    "minibatches",
    "pack",
    "rollout_stats",
]
