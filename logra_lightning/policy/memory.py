"""`MemoryOptions`: what trades memory against time, and never changes a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryOptions:
    """What trades memory against time; results are the same up to rounding.

    Args:
        max_tokens_per_microbatch: padded tokens of one forward and backward pass.
        activation_checkpointing: keep only the input of each layer during the forward pass, and
            compute the rest again in the backward pass.
        logprob_chunk_tokens: number of tokens whose logits exist at the same time.
    """

    max_tokens_per_microbatch: int = 16_384
    activation_checkpointing: bool = False
    logprob_chunk_tokens: int = 512
