"""Rollouts: engines that sample, rewards and advantages on what they sampled, microbatches."""

from logra_lightning.rollout.collect import collect, evaluate
from logra_lightning.rollout.engine import Engine
from logra_lightning.rollout.pack import pack
from logra_lightning.rollout.stats import rollout_stats
from logra_lightning.rollout.torch_engine import TorchEngine

__all__ = ["Engine", "TorchEngine", "collect", "evaluate", "pack", "rollout_stats"]
