"""The head of a `transformers` model, read off the model and checked against its own logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.distributed.sharding import gathered
from logra_lightning.objective.logprobs import Head
from logra_lightning.types import Microbatch

# Largest difference of a logit, relative to the largest logit.
_FLOAT32_TOLERANCE, _TOLERANCE = 1e-4, 2e-2


def head_of(policy: nn.Module) -> Head:
    """The head of a `transformers` causal language model.

    Raises:
        ValueError: no output embedding.
    """
    policy_: Any = policy
    output = policy_.get_output_embeddings()
    if output is None:
        raise ValueError(f"{type(policy).__name__} has no output embedding (lm_head) to train with")
    config = policy_.config
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(output.weight, getattr(output, "bias", None), scale, softcap)


def final_hidden(policy: nn.Module, input_ids: Tensor) -> Tensor:
    """[B, L] right-padded token ids to [B, L, H] hidden states after the final norm.

    No attention mask: padding on the right of a causal model changes nothing to its left.
    """
    policy_: Any = policy
    return policy_.base_model(input_ids=input_ids, use_cache=False).last_hidden_state


def trained_hidden(policy: nn.Module, microbatch: Microbatch) -> Tensor:
    """[T, H] final hidden states at the positions that predict the trained tokens."""
    predicts = microbatch.completion_mask[:, 1:]  # position t predicts token t + 1
    return final_hidden(policy, microbatch.input_ids)[:, :-1][predicts]


@torch.no_grad()
def check_head(policy: nn.Module) -> None:
    """Refuse a model whose logits are not those of `head_of`, by a forward pass of few tokens.

    Args:
        policy: a `transformers` causal language model.

    Raises:
        ValueError: the logits differ.
    """
    policy_: Any = policy
    device = next(policy.parameters()).device
    vocabulary = policy_.config.get_text_config().vocab_size
    tokens = torch.arange(1, 9, dtype=torch.int64, device=device)[None] % vocabulary
    expected = policy_(input_ids=tokens, use_cache=False).logits[0].to(torch.float32)
    hidden = final_hidden(policy, tokens)[0]
    with gathered(policy_.get_output_embeddings()):
        actual = head_of(policy).logits(hidden)
    error = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    if not error <= (_FLOAT32_TOLERANCE if policy_.dtype == torch.float32 else _TOLERANCE):
        raise ValueError(
            f"{type(policy).__name__} makes its logits in a way that is not supported: they "
            f"differ from those of its output embedding by {error:.1e} of the largest"
        )
