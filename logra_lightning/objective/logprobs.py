"""Logprobs and entropy of tokens, in chunks: `[tokens, vocabulary]` in fp32 never exists whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

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


def token_logprobs(
    hidden: Tensor,
    completion_ids: Tensor,
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
        completion_ids: [T] int64.
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
        for h, y in zip(hidden.split(chunk_tokens), completion_ids.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, completion_ids: Tensor, head: Head, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden) / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, completion_ids[:, None])[:, 0] - normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_p = logits - normalizer[:, None]
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return logprobs, entropy


def plain_token_logprobs(
    hidden: Tensor, completion_ids: Tensor, head: Head, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` as the textbook has it, with all logits at once: the reference in tests."""
    distribution = torch.log_softmax(head.logits(hidden) / temperature, dim=-1)
    logprobs = distribution.gather(-1, completion_ids[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(dim=-1).detach()
