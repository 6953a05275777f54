"""`BatchStats`: collects the numbers to plot from the microbatches of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from logra_lightning.distributed.processes import of_all_processes
from logra_lightning.types import Microbatch

_WEIGHT, _SQUARE = "weight", "weight_square"


class BatchStats:
    """Means and extremes over the completion tokens of a batch.

    They do not depend on how the tokens were cut into microbatches. Where a batch has several
    optimizer steps, the mean is taken over each step first, then over the steps: with 2 in the
    first step and 6 in the second it is 4, however many tokens each step had. A step in which no
    process added anything does not count.
    """

    def __init__(self) -> None:
        self._step = 0
        self._steps: set[int] = set()  # those in which something was added
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Begin the next optimizer step: what is added from here on belongs to it."""
        self._step += 1

    def add(self, name: str, share: Tensor) -> None:
        """Add the part [] that a microbatch contributes to the step's value of `name`."""
        self._steps.add(self._step)
        share = share.detach().to(torch.float64)
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def add_mean(self, name: str, values: Tensor, microbatch: Microbatch) -> None:
        """Add the [T] values of a microbatch to the mean of `name` over the step's tokens."""
        self.add(name, values.detach().to(torch.float64).sum() / microbatch.num_completion_tokens)

    def add_extreme(self, name: str, values: Tensor) -> None:
        """Keep the largest of all [T] values, or the smallest where `name` ends in `_min`."""
        smallest = name.endswith("_min")
        value = values.detach().amin() if smallest else values.detach().amax()
        if name in self._extremes:
            pick = torch.minimum if smallest else torch.maximum
            value = pick(value, self._extremes[name])
        self._extremes[name] = value

    def add_weights(self, weights: Tensor, microbatch: Microbatch) -> None:
        r"""Count [T] importance weights w in `mismatch/effective_sample_frac`.

        That is :math:`(\sum w)^2 / (N \sum w^2)` over the N tokens of the step: 1 where all weights
        are equal, 1/N where all but one are zero.
        """
        self.add_mean(_WEIGHT, weights, microbatch)
        self.add_mean(_SQUARE, weights.square(), microbatch)

    def values(self) -> dict[str, float]:
        """The metrics by name, over all processes; every process must call it."""
        processes = of_all_processes((_numbers(self._sums), _numbers(self._extremes), self._steps))
        sums: dict[str, float] = {}
        for shares, _, _ in processes:
            for name, share in shares.items():
                sums[name] = sums.get(name, 0.0) + share
        # A step may have rollouts in one process alone, and another step in the other alone.
        steps = len(set().union(*(own for _, _, own in processes)))
        values = {name: total / steps for name, total in sums.items()}
        if _WEIGHT in values:
            weight, square = values.pop(_WEIGHT), values.pop(_SQUARE)
            values["mismatch/effective_sample_frac"] = weight**2 / max(square, 1e-30)
        for _, extremes, _ in processes:
            for name, value in extremes.items():
                pick = min if name.endswith("_min") else max
                values[name] = pick(value, values.get(name, value))
        return values


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}
