"""Logprobs and entropy of tokens, in chunks: `[tokens, vocabulary]` in fp32 never exists whole.

The head is read off the model, with what some models do to their logits (a softcap, a scale); a
model whose logits are made in another way is refused by `check_head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from logra_lightning.sharding import gathered

_EXACT_ROWS = 8192  # of the head's weight in fp32 at a time


@dataclass(frozen=True)
class Head:
    """From final hidden states to logits.

    Args:
        weight: [V, H], of the output embedding.
        bias: [V] or None.
        scale: multiplies the logits (Cohere's `logit_scale`, the inverse of Granite's
            `logits_scaling`).
        softcap: bounds the logits smoothly, after the scale (Gemma's `final_logit_softcapping`).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] hidden states to [n, V] fp32 logits, before any temperature."""
        return self._finish(linear(hidden, self.weight, self.bias))

    def exact_logits(self, hidden: Tensor) -> Tensor:
        """The same, computed in fp32 whatever the dtype of weight and hidden states.

        The weight is converted piece by piece, so that no fp32 copy of it exists.
        """
        hidden = hidden.to(torch.float32)
        rows = _EXACT_ROWS if self.weight.dtype != torch.float32 else self.weight.shape[0]
        parts = [linear(hidden, weight.to(torch.float32)) for weight in self.weight.split(rows)]
        logits = torch.cat(parts, dim=-1)
        return self._finish(logits if self.bias is None else logits + self.bias)

    def _finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.to(torch.float32)


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


@torch.no_grad()
def check_head(policy: nn.Module, *, tolerance: float) -> None:
    """Refuse a model whose logits are not those of `head_of`, by a forward pass of few tokens.

    Args:
        policy: a `transformers` causal language model.
        tolerance: largest difference of a logit, relative to the largest logit.

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
    if not error <= tolerance:
        raise ValueError(
            f"{type(policy).__name__} makes its logits in a way that is not supported: they "
            f"differ from those of its output embedding by {error:.1e} of the largest"
        )


def token_logprobs(
    hidden: Tensor,
    target_ids: Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int = 512,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Logprobs of tokens, and the entropy of the distributions they were drawn from.

    .. math:: \log \mathrm{softmax}(z / \mathrm{temperature})_{\mathrm{target}}

    Logits exist for `chunk_tokens` tokens at a time and are computed again in backward.

    Args:
        hidden: [T, H], final hidden states at the positions before the targets.
        target_ids: [T] int64.
        head: from `head_of`.
        temperature: divides the logits.
        chunk_tokens: tokens whose logits exist at the same time.
        entropy_gradient: whether the entropy has a gradient too.

    Returns:
        [T] fp32 logprobs in nats, with gradient; [T] fp32 entropy in nats.
    """
    chunk = partial(_chunk, head=head, temperature=temperature, entropy_gradient=entropy_gradient)
    parts = [
        checkpoint(chunk, h, y, use_reentrant=False, preserve_rng_state=False)
        for h, y in zip(hidden.split(chunk_tokens), target_ids.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, target_ids: Tensor, head: Head, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden) / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, target_ids[:, None])[:, 0] - normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_p = logits - normalizer[:, None]
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return logprobs, entropy


def plain_token_logprobs(
    hidden: Tensor, target_ids: Tensor, head: Head, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` as the textbook has it, with all logits at once: the reference in tests."""
    distribution = torch.log_softmax(head.logits(hidden) / temperature, dim=-1)
    logprobs = distribution.gather(-1, target_ids[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(dim=-1).detach()
