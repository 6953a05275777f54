"""What is optimized: advantages, losses and token logprobs. torch and `types` only."""

from logra_lightning.objective.advantage import GRPO, Advantage
from logra_lightning.objective.logprobs import Head, check_head, head_of, token_logprobs
from logra_lightning.objective.loss import ClippedPolicyGradient, Loss

__all__ = [
    "GRPO",
    "Advantage",
    "ClippedPolicyGradient",
    "Head",
    "Loss",
    "check_head",
    "head_of",
    "token_logprobs",
]
