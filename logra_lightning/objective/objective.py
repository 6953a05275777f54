"""`Objective`: the loss of a microbatch, with everything that is added to the policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.objective.batch_stats import BatchStats
from logra_lightning.objective.correction import Correction
from logra_lightning.objective.loss import Loss
from logra_lightning.objective.reference_kl import ReferenceKL
from logra_lightning.types import Microbatch


@dataclass(frozen=True)
class Objective:
    r"""What is minimized: a sum over the trained tokens t of a step.

    .. math:: \sum_t w_t \big(L_t + 1[c_t > 0]\, (\beta\, \mathrm{KL}_t - \eta\, H_t)\big)

    The weights w come from the normalizer; L is the loss, c the correction, KL the reference KL and
    H the entropy of the distribution that the token was drawn from. The correction changes no
    value: it multiplies the gradient that flows back from L through the logprob of each token. That
    is also right where a loss depends on a whole completion. A token that the correction masks
    (c = 0) has no other terms either.

    Args:
        loss: the loss L of each token.
        correction: the weights c of tokens to which engine and trainer give different
            probabilities.
        reference_kl: estimator of the KL to the reference, with its coefficient beta; None leaves
            the term out.
        entropy_coefficient: the factor eta of the entropy bonus; 0 leaves the term out.
    """

    loss: Loss
    correction: Correction
    reference_kl: ReferenceKL | None = None
    entropy_coefficient: float = 0.0

    def __call__(
        self, logprobs: Tensor, entropies: Tensor, microbatch: Microbatch, stats: BatchStats
    ) -> Tensor:
        """Return what the microbatch contributes to the step's loss, and count what is logged.

        The loss of the step is the sum over its microbatches, in all processes. A microbatch
        without any trained token contributes 0, with a graph, and nothing of it is counted.

        Args:
            logprobs: [T] fp32, nats, the logprob of each trained token under the policy, with
                gradient.
            entropies: [T] fp32, nats; with gradient where `entropy_coefficient` is not 0.
            microbatch: the tokens.
            stats: collects what is logged.

        Returns:
            [] fp32, with gradient.
        """
        if len(logprobs) == 0:  # made where another process has one microbatch more
            return logprobs.sum()
        old = microbatch.old_logprobs if microbatch.old_logprobs is not None else logprobs.detach()
        correction = self._correct(old, microbatch, stats)
        value = logprobs.detach()
        # The same value. c g, not g + (c - 1) g, which would round small weights away.
        corrected = value + correction * (logprobs - value)
        losses, seen = self.loss(corrected, corrected - old, microbatch)
        trains = (correction > 0).to(losses.dtype)
        stats.add("loss/policy", (microbatch.token_weights * losses).sum())
        if self.reference_kl is not None:
            assert microbatch.reference_logprobs is not None
            kl = self.reference_kl(logprobs, microbatch.reference_logprobs)
            losses = losses + self.reference_kl.coefficient * trains * kl
            stats.add_mean("loss/reference_kl", kl, microbatch)
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * trains * entropies
        for name, values in {**seen, "policy/entropy": entropies}.items():
            stats.add_mean(name, values, microbatch)
        return (microbatch.token_weights * losses).sum()

    @torch.no_grad()
    def _correct(self, old: Tensor, microbatch: Microbatch, stats: BatchStats) -> Tensor:
        """[T] weights of the correction; also counts how far engine and trainer differ."""
        log_ratio = old - microbatch.rollout_logprobs
        ratio, weights = log_ratio.exp(), self.correction(log_ratio, microbatch)
        means = {
            "mismatch/logprob_diff": log_ratio.abs(),
            "mismatch/kl": -log_ratio,
            "mismatch/is_ratio": ratio,
            "mismatch/masked_frac": weights == 0,
        }
        for name, values in means.items():
            stats.add_mean(name, values, microbatch)
        stats.add_weights(weights, microbatch)
        stats.add_extreme("mismatch/logprob_diff_max", log_ratio.abs())
        stats.add_extreme("mismatch/is_ratio_min", ratio)
        stats.add_extreme("mismatch/is_ratio_max", ratio)
        return weights
