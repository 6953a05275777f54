"""`Objective`: the loss of a microbatch, with all that is added to the policy gradient."""

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
    r"""What is minimized.

    .. math:: \sum_t w_t \big(L_t + 1[c_t > 0]\, (\beta\, \mathrm{KL}_t - \eta\, H_t)\big)

    with the token weights w of the normalizer, the loss L, the reference KL and the entropy H of
    the sampling distribution. The correction c multiplies what flows back from L through the
    logprob of each token, which is right for losses of whole completions too.

    Args:
        loss: L.
        correction: c.
        reference_kl: the estimator with its coefficient beta; None leaves it out.
        entropy_coefficient: eta.
    """

    loss: Loss
    correction: Correction
    reference_kl: ReferenceKL | None = None
    entropy_coefficient: float = 0.0

    def __call__(
        self, logprobs: Tensor, entropies: Tensor, microbatch: Microbatch, stats: BatchStats
    ) -> Tensor:
        """The microbatch's share of the step's loss, [] fp32; the shares of a step add up.

        Args:
            logprobs: [T] fp32, nats, of the trained tokens under the policy, with gradient.
            entropies: [T] fp32, nats; with gradient where there is a bonus for them.
            microbatch: the tokens.
            stats: gets what is logged.
        """
        if len(logprobs) == 0:  # the other processes have one microbatch more than this one
            return logprobs.sum()
        old = microbatch.old_logprobs if microbatch.old_logprobs is not None else logprobs.detach()
        correction = self._correct(old, microbatch, stats)
        corrected = logprobs + (correction - 1) * (logprobs - logprobs.detach())  # the same value
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
        """[T] weights of the correction; the mismatch between engine and trainer is logged."""
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
