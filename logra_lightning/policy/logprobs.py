"""Logprobs and entropies under a `transformers` policy: of a microbatch's tokens, of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.distributed.sharding import gathered_through_backward
from logra_lightning.objective.logprobs import token_logprobs
from logra_lightning.policy.head import head_of, trained_hidden
from logra_lightning.types import Microbatch


def microbatch_logprobs(
    policy: nn.Module, microbatch: Microbatch, *, chunk_tokens: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained tokens under the policy, and entropies where they were drawn.

    Args:
        policy: a `transformers` causal language model.
        microbatch: T trained tokens, and the temperature that they were sampled with.
        chunk_tokens: number of tokens whose logits exist at the same time.
        entropy_gradient: whether the entropies have a gradient too.

    Returns:
        [T] fp32 logprobs in nats, with gradient; [T] fp32 entropies in nats.
    """
    policy_: Any = policy
    hidden = trained_hidden(policy, microbatch)
    with gathered_through_backward(policy_.get_output_embeddings(), hidden) as hidden:
        return token_logprobs(
            hidden,
            microbatch.completion_ids,
            head_of(policy),
            temperature=microbatch.temperature,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )


@torch.no_grad()
def completion_logprobs(
    microbatches: Iterable[Microbatch],
    logprobs_of: Callable[[Microbatch], tuple[Tensor, Tensor]],
    num_rollouts: int,
) -> list[Tensor]:
    """Logprobs of each rollout's completion, in the order of the rollouts.

    Args:
        microbatches: all B rollouts, packed in any order.
        logprobs_of: a microbatch to [T] logprobs, and anything else.
        num_rollouts: B.

    Returns:
        B tensors of [n] fp32, in nats.
    """
    logprobs: list[Tensor] = [torch.empty(0)] * num_rollouts
    for microbatch in microbatches:
        parts = logprobs_of(microbatch)[0].split(microbatch.lengths.tolist())
        # An empty microbatch, made because another process has one more, has no rollouts.
        for i, part in zip(microbatch.rollouts, parts, strict=False):
            logprobs[i] = part
    return logprobs
