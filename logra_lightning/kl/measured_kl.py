"""The KL of an update, measured before any weight changes (row 6 of docs/method.md).

`StepKL` first predicts the KL of the pending step, then measures it at the scales that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from logra_lightning.distributed.processes import sum_over_processes_
from logra_lightning.kl.inject import Change
from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.kl.predicted_kl import (
    difference_step,
    finite_differences,
    predicted_kl,
    tangents,
)
from logra_lightning.optim.proposal import Proposal
from logra_lightning.sketch.bank import SketchBank
from logra_lightning.sketch.precision import full_precision


@torch.no_grad()
def measured_kl(
    probe: KLProbe, old: Sequence[Tensor], new: Sequence[Tensor], *, chunk_tokens: int = 64
) -> Tensor:
    """The sum of KL(old || new) over the tokens.

    Args:
        probe: turns hidden states into logits.
        old: hidden states [T, H] of each forward pass before the update.
        new: the same after the update.
        chunk_tokens: number of tokens whose logits [chunk_tokens, V] exist at a time.

    Returns:
        [2] fp64: the sum in nats, and the number of tokens.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for before, after in zip(old, new, strict=True):
        for a, b in zip(before.split(chunk_tokens), after.split(chunk_tokens), strict=True):
            total += kl_divergence(probe.logits(a), probe.logits(b)).sum()
            count += a.shape[0]
    return torch.stack([total, total.new_tensor(count)])


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(z) || softmax(z')) of each row.

    Args:
        logits: z [n, V].
        other: z' [n, V].

    Returns:
        [n] fp64, nats.
    """
    log_p = torch.log_softmax(logits.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(other.to(torch.float64), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


class StepKL:
    """The KL of the pending step, as a mean over the tokens of all processes' probes.

    Every process must call its methods. No weight changes.

    Args:
        probe: the tokens of this process, and how to run the model on them.
        proposal: the pending step.
        sketches: the sketched layers.

    Attributes:
        old: hidden states [T, H] of each forward pass before the step; filled by `predict`.
    """

    def __init__(self, probe: KLProbe, proposal: Proposal, sketches: SketchBank) -> None:
        self.probe = probe
        self.old: list[Tensor] = []
        self._proposal = proposal
        self._sketches = sketches

    def predict(self, method: Literal["forward_ad", "finite_difference"]) -> float:
        """q, the predicted KL of a step of scale 1, in nats per token; called before `measure`."""
        proposal = self._proposal
        changes = [
            Change(layer, proposal.direction(layer), proposal.decay_rate)
            for layer in self._sketches
        ]
        if method == "forward_ad":
            pairs = tangents(self.probe, changes)
            self.old = [hidden for hidden, _ in pairs]
        else:
            pairs = finite_differences(self.probe, changes, step=difference_step(changes))
            self.old = self.probe.hidden()
        return self._mean(predicted_kl(self.probe, pairs))

    def changes(self, scale: float) -> list[Change]:
        """The update at this step scale, with the directions rounded as they would be merged."""
        proposal = self._proposal
        rate = scale * proposal.decay_rate
        return [
            Change(layer, proposal.rounded_direction(layer, scale), rate)
            for layer in self._sketches
        ]

    def measure(self, scale: float) -> float:
        """KL(old || new) of the update at this step scale, in nats per token."""
        return self._between(self.old, self.probe.hidden(self.changes(scale)))

    def measure_within(
        self, precision: Callable[[], AbstractContextManager[None]], scale: float
    ) -> tuple[float, float]:
        """The KL of the update as forward passes in another precision show it.

        Args:
            precision: makes the context of those forward passes, for example bf16 autocast.
            scale: the step scale.

        Returns:
            KL(old || new) of the update in those forward passes, and KL(exact || old), which that
            precision makes of the weights without an update; both in nats per token.
        """
        with self.probe.prepared():
            with precision():
                old = self.probe.hidden()
                new = self.probe.hidden(self.changes(scale))
            with full_precision(self.probe.device):
                return self._between(old, new), self._between(self.old, old)

    def _between(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
        return self._mean(measured_kl(self.probe, old, new))

    def _mean(self, total: Tensor) -> float:
        total = sum_over_processes_(total)
        return (total[0] / total[1]).item()
