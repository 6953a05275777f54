"""From prompts to microbatches: sampling, scoring, advantages, packing."""

from logra_lightning.rollout.collect import DynamicSampling, Sampler, collect
from logra_lightning.rollout.evaluation import EvalMetrics, evaluate
from logra_lightning.rollout.packing import in_step, minibatches, pack
from logra_lightning.rollout.probe import rollout_probe
from logra_lightning.rollout.stats import rollout_stats

__all__ = [
    "DynamicSampling",
    "EvalMetrics",
    "Sampler",
    "collect",
    "evaluate",
    "in_step",
    "minibatches",
    "pack",
    "rollout_probe",
    "rollout_stats",
]
