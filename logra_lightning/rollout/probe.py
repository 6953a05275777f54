"""`rollout_probe`: rollouts of a `transformers` policy as a `KLProbe`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.distributed.sharding import gathered
from logra_lightning.kl import KLProbe
from logra_lightning.policy.head import head_of, trained_hidden
from logra_lightning.policy.load import plain_layers
from logra_lightning.rollout.packing import pack, same_number_per_process
from logra_lightning.types import Rollouts

_TOKENS = 2048  # padded tokens of one forward pass, which is in fp32 and has plain attention


def rollout_probe(
    policy: nn.Module,
    rollouts: Rollouts,
    *,
    temperature: float,
    device: torch.device,
    mismatch: float | None = None,
    together: bool = False,
) -> KLProbe:
    """The completion tokens of `rollouts`.

    Args:
        policy: a `transformers` causal language model.
        rollouts: all of them are used.
        temperature: the temperature that they were sampled with.
        device: device of the policy.
        mismatch: see `KLProbe`.
        together: let all processes make the same number of forward passes, as sharded weights
            need it; then every process must call this.
    """
    microbatches = pack(
        rollouts,
        max([_TOKENS, *rollouts.sizes]),
        temperature=temperature,
        device=device,
    )
    if together:
        microbatches = same_number_per_process(microbatches, device)

    @contextmanager
    def prepared() -> Iterator[None]:
        output: Any = policy.get_output_embeddings()  # type: ignore[operator]
        with plain_layers(policy), gathered(output):
            yield

    return KLProbe(
        model=policy,
        forwards=[partial(trained_hidden, policy, microbatch) for microbatch in microbatches],
        logits=lambda hidden: _logits(policy, hidden) / temperature,
        prepared=prepared,
        mismatch=mismatch,
    )


def _logits(policy: nn.Module, hidden: Tensor) -> Tensor:
    """[n, H] hidden states to [n, V] fp32 logits; in fp32 where the hidden states are."""
    head = head_of(policy)
    in_fp32 = hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type)
    return head.exact_logits(hidden) if in_fp32 else head.logits(hidden)
