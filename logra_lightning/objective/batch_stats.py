"""`BatchStats`: what the microbatches of a batch add up to, as numbers to plot."""

from __future__ import annotations

import torch
from torch import Tensor

from logra_lightning.types import Microbatch

_WEIGHT, _SQUARE = "weight", "weight_square"


class BatchStats:
    """Means and extremes over completion tokens, however they were cut into microbatches.

    Where a batch has several optimizer steps, means are those of the steps' means.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """What is added from here on belongs to the next optimizer step."""
        self._steps += 1

    def add(self, name: str, share: Tensor) -> None:
        """Add a microbatch's share [] to the step's value of `name`."""
        share = share.detach().to(torch.float64)
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def add_mean(self, name: str, values: Tensor, microbatch: Microbatch) -> None:
        """Add [T] values of a microbatch to the mean over the step's tokens."""
        self.add(name, values.detach().to(torch.float64).sum() / microbatch.num_completion_tokens)

    def add_extreme(self, name: str, values: Tensor, *, largest: bool) -> None:
        """Keep the largest, or the smallest, of all [T] values."""
        value = values.detach().amax() if largest else values.detach().amin()
        if name in self._extremes:
            pick = torch.maximum if largest else torch.minimum
            value = pick(value, self._extremes[name])
        self._extremes[name] = value

    def add_weights(self, weights: Tensor, microbatch: Microbatch) -> None:
        r"""Count [T] importance weights in `mismatch/effective_sample_frac`.

        It is :math:`(\sum w)^2 / (N \sum w^2)`: 1 where all N are the same, 1/N where one is all.
        """
        self.add_mean(_WEIGHT, weights, microbatch)
        self.add_mean(_SQUARE, weights.square(), microbatch)

    def values(self) -> dict[str, Tensor]:
        """Tag to [] value."""
        means = {name: value / max(self._steps, 1) for name, value in self._sums.items()}
        values = means | self._extremes
        if _WEIGHT in values:
            weight, square = values.pop(_WEIGHT), values.pop(_SQUARE)
            values["mismatch/effective_sample_frac"] = weight.square() / square.clamp_min(1e-30)
        return {name: value.to(torch.float32) for name, value in values.items()}
