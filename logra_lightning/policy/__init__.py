"""The policy: a `transformers` causal language model, made ready for training and given away."""

from logra_lightning.policy.head import check_head, final_hidden, head_of
from logra_lightning.policy.load import (
    checkpoint_activations_,
    context_length,
    exact_buffers,
    fixed_context_length,
    freeze_,
    load_policy,
    plain_layers,
    policy_source,
    stop_token_ids,
)
from logra_lightning.policy.memory import MemoryOptions
from logra_lightning.policy.reference import Reference
from logra_lightning.policy.what_trains import what_trains

__all__ = [
    "MemoryOptions",
    "Reference",
    "check_head",
    "checkpoint_activations_",
    "context_length",
    "exact_buffers",
    "final_hidden",
    "fixed_context_length",
    "freeze_",
    "head_of",
    "load_policy",
    "plain_layers",
    "policy_source",
    "stop_token_ids",
    "what_trains",
]
