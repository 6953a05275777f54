"""`Factors`: one update as trainer and engines merge it (rows 8 and 9 of docs/method.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.sketch.projection import PROJECTIONS, projection_key


@dataclass(frozen=True)
class Factors:
    """One update of all sketched weights: `W <- decay * W - D A` for each of them.

    A is not stored: whoever merges makes it again from `seed`, `draw` and the layer's name.

    Args:
        version: number of optimizer steps made before this one.
        seed: base seed of the projections.
        draw: number of the draw of projections that the update was made with.
        projection: `rademacher` or `gaussian`.
        decay: every sketched weight is multiplied by it first, in fp32.
        directions: name of the layer to D [d, r] bf16, already multiplied by the step scale; empty
            when the step changed nothing.
    """

    version: int
    seed: int
    draw: int
    projection: str
    decay: float
    directions: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all directions together."""
        return sum(d.nbytes for d in self.directions.values())

    def entries(self, name: str, in_features: int, *, device: torch.device) -> Tensor:
        """`A * sqrt(r)` of one layer, made from the seed.

        Args:
            name: the layer, a key of `directions`.
            in_features: k, its number of inputs.
            device: device to make it on; the bits do not depend on it.

        Returns:
            [r, k], int8 signs or fp32.
        """
        key = projection_key(self.seed, self.draw, name)
        rank = self.directions[name].shape[1]
        return PROJECTIONS[self.projection](key, rank, in_features, device=device)
