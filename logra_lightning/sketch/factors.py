"""`Factors`: one update as everyone merges it, trainer and engines alike (rows 8 and 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.sketch.projection import PROJECTIONS, projection_key


@dataclass(frozen=True)
class Factors:
    """One update of all sketched weights: `W <- decay * W - D A` for each.

    Args:
        version: optimizer steps completed before this one.
        seed: base seed of the projections.
        draw: which draw of the projections the update belongs to.
        projection: `rademacher` or `gaussian`.
        decay: scalar that multiplies every sketched weight first, in fp32.
        directions: name of the weight's module to D [d, r] bf16, step scale included; empty where
            the step changed nothing.
    """

    version: int
    seed: int
    draw: int
    projection: str
    decay: float
    directions: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all directions."""
        return sum(d.nbytes for d in self.directions.values())

    def entries(self, name: str, in_features: int, *, device: torch.device) -> Tensor:
        """[r, k] of one weight: the projection times sqrt(r)."""
        key = projection_key(self.seed, self.draw, name)
        rank = self.directions[name].shape[1]
        return PROJECTIONS[self.projection](key, rank, in_features, device=device)
