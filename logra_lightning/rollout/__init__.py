"""From prompts to microbatches: sampling, scoring, advantages, packing."""

from logra_lightning.rollout.batch_log import BatchLog
from logra_lightning.rollout.collect import DynamicSampling, Sampler, collect
from logra_lightning.rollout.evaluation import EvalMetrics, evaluate
from logra_lightning.rollout.evaluation_options import EvaluationOptions, EvaluationSampling
from logra_lightning.rollout.packing import (
    minibatches,
    pack,
    same_number_per_process,
    trained_ones,
)
from logra_lightning.rollout.probe import rollout_probe
from logra_lightning.rollout.stats import rollout_stats

__all__ = [
    "BatchLog",
    "DynamicSampling",
    "EvalMetrics",
    "EvaluationOptions",
    "EvaluationSampling",
    "Sampler",
    "collect",
    "evaluate",
    "minibatches",
    "pack",
    "rollout_probe",
    "rollout_stats",
    "same_number_per_process",
    "trained_ones",
]
