"""Logprobs and entropies of tokens, computed in chunks so that all logits never exist at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

_EXACT_ROWS = 8192  # how many rows of the head's weight are in fp32 at the same time


@dataclass(frozen=True)
class Head:
    """Turns final hidden states into logits, for H hidden units and a vocabulary of V tokens.

    Args:
        weight: [V, H] weight of the output embedding.
        bias: [V] bias of the output embedding, or None.
        scale: number that multiplies the logits: Cohere's `logit_scale`, or 1 divided by Granite's
            `logits_scaling`.
        softcap: bound c, applied after the scale: logits z become c tanh(z / c). Gemma's
            `final_logit_softcapping`. None leaves the logits unbounded.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn [n, H] hidden states into [n, V] fp32 logits, not divided by a temperature."""
        return self._finish(linear(hidden, self.weight, self.bias))

    def exact_logits(self, hidden: Tensor) -> Tensor:
        """Like `logits`, but all of it in fp32, whatever the dtype of weight and hidden states.

        The weight is converted piece by piece, so there is never an fp32 copy of all of it.
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
    r"""The logprob of each token, and the entropy of the distribution it was drawn from.

    .. math:: \log \mathrm{softmax}(z / \mathrm{temperature})_{\mathrm{token}}

    The logits z exist for `chunk_tokens` tokens at a time, and are computed again in the backward
    pass: for 2,000 tokens, a vocabulary of 50,000 and chunks of 500, they take 100 MB, not 400.

    Args:
        hidden: [T, H] final hidden states, each from the position before its token.
        completion_ids: [T] int64, the tokens.
        head: what turns hidden states into logits, see `head_of`.
        temperature: number that divides the logits.
        chunk_tokens: how many tokens have logits at the same time.
        entropy_gradient: whether the entropies have a gradient too.

    Returns:
        [T] fp32 logprobs in nats, with gradient; [T] fp32 entropies in nats. Without any tokens
        both are empty, and the logprobs still have a graph.
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
