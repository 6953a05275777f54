"""The KL of the pending step: predicted, then measured at the scales that are tried.

Three ways to take it, each a class: `StepKL` in fp32, `TangentKL` in the policy's own dtype, and
`DifferenceKL` for models with an operation that has no forward-mode derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from logra_lightning.distributed.processes import sum_over_processes_
from logra_lightning.kl.inject import Change
from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.kl.measured_kl import LATER, measured_kl, tangent_kl
from logra_lightning.kl.predicted_kl import (
    difference_step,
    finite_differences,
    predicted_kl,
    tangents,
)
from logra_lightning.optim.proposal import Proposal
from logra_lightning.sketch.bank import SketchBank


class StepKL:
    """The KL of the pending step, as a mean over the tokens of all processes' probes.

    It is predicted by tangents and measured by two forward passes, which needs fp32: the forward
    passes have to see changes of the size of the update. No weight changes. Every process must call
    its methods, within the same precision.

    Args:
        probe: the tokens of this process, and how to run the model on them.
        proposal: the pending step.
        sketches: the sketched layers.

    Attributes:
        start: hidden states [T, H] of each forward pass before the step, and their derivatives
            [T, H] along the step of scale 1; filled by `predict`.
    """

    def __init__(self, probe: KLProbe, proposal: Proposal, sketches: SketchBank) -> None:
        self.probe = probe
        self.start: list[tuple[Tensor, Tensor]] = []
        self._proposal = proposal
        self._sketches = sketches

    def predict(self) -> float:
        """q, the predicted KL of a step of scale 1, in nats per token; called before `measure`."""
        self.start = tangents(self.probe, self._whole())
        return mean_of_all_processes(predicted_kl(self.probe, self.start))

    def measure(self, scale: float) -> float:
        """KL(old || new) of the update at this step scale, in nats per token."""
        old = [hidden for hidden, _ in self.start]
        new = self.probe.hidden(self.changes(scale))
        return mean_of_all_processes(measured_kl(self.probe, old, new))

    def measure_within(
        self, precision: Callable[[], AbstractContextManager[None]], scale: float
    ) -> float:
        """The KL of the update as two forward passes in another precision show it.

        Args:
            precision: makes the context of those forward passes, for example bf16 autocast.
            scale: the step scale.

        Returns:
            KL(old || new) in nats per token.
        """
        with self.probe.prepared(), precision():
            old, new = self.probe.hidden(), self.probe.hidden(self.changes(scale))
            return mean_of_all_processes(measured_kl(self.probe, old, new))

    def changes(self, scale: float) -> list[Change]:
        """The update at this step scale, with the directions rounded as they would be merged."""
        rate = scale * self._proposal.decay_rate
        rounded = self._proposal.rounded_direction
        return [Change(layer, partial(rounded, layer, scale), rate) for layer in self._sketches]

    def _whole(self) -> Sequence[Change]:
        """The step of scale 1 as it is proposed."""
        direction, rate = self._proposal.direction, self._proposal.decay_rate
        return [Change(layer, partial(direction, layer), rate) for layer in self._sketches]


class TangentKL(StepKL):
    """Takes the KL of the step in the policy's own dtype: no weight is ever widened to fp32.

    Tangents are relative to the update, so bf16 costs them a few percent at any size of the step.
    """

    def measure(self, scale: float) -> float:
        """KL(old || new) of the update at this step scale, by derivatives at two points of it."""
        later = tangents(self.probe, self.changes(scale), at=LATER)
        return mean_of_all_processes(tangent_kl(self.probe, self.start, later, scale=scale))


class DifferenceKL(StepKL):
    """Predicts by central differences of two forward passes, which need no derivatives."""

    def predict(self) -> float:
        """q, approximately; called before `measure`."""
        changes = self._whole()
        pairs = finite_differences(self.probe, changes, step=difference_step(changes))
        derivatives = [tangent for _, tangent in pairs]
        self.start = list(zip(self.probe.hidden(), derivatives, strict=True))
        return mean_of_all_processes(predicted_kl(self.probe, pairs))


def mean_of_all_processes(total: Tensor) -> float:
    """The mean over the tokens of all processes, of [2]: the sum and the number of this one's."""
    total = sum_over_processes_(total)
    return (total[0] / total[1]).item()
