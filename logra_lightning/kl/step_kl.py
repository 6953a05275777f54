"""`StepKL`: the KL of the pending step of a `RowAdam`, predicted and measured at any scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from logra_lightning.kl.inject import Change
from logra_lightning.kl.predicted_kl import (
    KLProbe,
    difference_step,
    finite_differences,
    measured_kl,
    predicted_kl,
    tangents,
)
from logra_lightning.optim.row_adam import RowAdam


class StepKL:
    """The pending step on the tokens of a probe; no weight is changed.

    Args:
        probe: the tokens.
        optimizer: with the proposal.
        reduce: [2] sum and count of this rank to those of all ranks.

    Attributes:
        old: hidden states before the step, once it has been predicted.
    """

    def __init__(
        self, probe: KLProbe, optimizer: RowAdam, reduce: Callable[[Tensor], Tensor]
    ) -> None:
        self.probe = probe
        self.old: list[Tensor] = []
        self._optimizer = optimizer
        self._reduce = reduce

    def predict(self, method: Literal["forward_ad", "finite_difference"]) -> float:
        """q, the predicted KL of a step of scale 1, in nats per token."""
        proposal, sketches = self._optimizer.propose(), self._optimizer.sketches
        changes = [Change(s, proposal.direction(s), proposal.decay_rate) for s in sketches]
        if method == "forward_ad":
            pairs = tangents(self.probe, changes)
            self.old = [hidden for hidden, _ in pairs]
        else:
            pairs = finite_differences(self.probe, changes, step=difference_step(changes))
            self.old = self.probe.hidden()
        return self._mean(predicted_kl(self.probe, pairs))

    def changes(self, scale: float) -> list[Change]:
        """What would be merged at this scale, rounded as it would be."""
        proposal, sketches = self._optimizer.propose(), self._optimizer.sketches
        rate = scale * proposal.decay_rate
        return [Change(s, proposal.rounded_direction(s, scale), rate) for s in sketches]

    def measure(self, scale: float) -> float:
        """KL(old || new) of a step of this scale, in nats per token."""
        return self.between(self.old, self.probe.hidden(self.changes(scale)))

    def between(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
        """KL(old || new) of any two lists of hidden states, in nats per token."""
        return self._mean(measured_kl(self.probe, old, new))

    def _mean(self, total: Tensor) -> float:
        total = self._reduce(total)
        return (total[0] / total[1]).item()
