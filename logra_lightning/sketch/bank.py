"""`SketchBank`: the sketches `S [d, r]` of all sketched weights (row 2 of docs/method.md).

They lie in one flat fp32 buffer, so that several processes add them up with one reduction, and
beside them the projections of the current step. `SketchCapture` fills the sketches, `RowAdam` reads
them; the strategy and the `SketchAccumulation` callback say when a step begins.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra_lightning.sketch.projection import PROJECTIONS, projection_key


@dataclass
class SketchedLayer:
    """One sketched weight.

    Args:
        name: the module's name, without the parts that wrappers insert.
        module: the linear layer, whose weight W is [d, k].
        total: [d, r] fp32, a view of the buffer `SketchBank.flat`. It is `S * sqrt(r)`, since the
            capture multiplies by `entries` and not by A.
        entries: [r, k], `A * sqrt(r)`; int8 signs, or fp32 where the projection is gaussian.
        scale: `1 / sqrt(r)`. `total * scale` is S and `entries * scale` is A.
    """

    name: str
    module: nn.Linear
    total: Tensor
    entries: Tensor
    scale: float

    @property
    def sketch(self) -> Tensor:
        """S [d, r] fp32, a new tensor."""
        return self.total * self.scale

    @property
    def projection(self) -> Tensor:
        """A [r, k] fp32, a new tensor."""
        return self.entries.to(torch.float32) * self.scale

    def row_squares(self) -> Tensor:
        """Squared norms of the rows of S, [d] fp64."""
        rows = torch.linalg.vector_norm(self.total, dim=1, dtype=torch.float32)
        return rows.to(torch.float64).square() * self.scale**2

    def gram(self) -> Tensor:
        """`A A^T` [r, r] fp32."""
        entries = self.entries.to(torch.float32)
        return (entries @ entries.t()).mul_(self.scale * self.scale)


class SketchBank:
    """The sketches of all sketched layers of a model.

    With weights [9, 12] and [7, 9] and rank 4 the buffer `flat` has (9 + 7) * 4 = 64 elements:
    the first 36 are `total [9, 4]` of the first layer, the other 28 `total [7, 4]` of the second.

    Iterating gives every `SketchedLayer`; `sketches[name]` gives one.

    Args:
        modules: name to linear layer, from `find_targets`.
        rank: r, the number of columns of every sketch.
        seed: base seed of the projections.
        projection: `rademacher` (random signs) or `gaussian`.
        device: device of the sketches and projections.

    Attributes:
        flat: [sum of d * r] fp32, the buffer of all sums.
        step: number of the step whose microbatches are being summed, None before the first.
        refresh_every: number of steps for which a projection is kept.
        draw: `step // refresh_every`; equal draws have equal projections.

    Raises:
        ValueError: `rank` is below 1 or above the in_features of a layer.
    """

    def __init__(
        self,
        modules: dict[str, nn.Linear],
        rank: int,
        *,
        seed: int = 0,
        projection: str = "rademacher",
        device: torch.device,
    ) -> None:
        _check_rank(modules, rank)
        self.rank = rank
        self.seed = seed
        self.refresh_every = 1
        self.step: int | None = None
        self.projection = projection
        self.draw = -1
        sizes = [m.out_features * rank for m in modules.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        views = self.flat.split(sizes)
        empty = torch.empty(0, dtype=torch.int8, device=device)
        self._layers = {
            name: SketchedLayer(name, module, view.view(-1, rank), empty, 1.0 / math.sqrt(rank))
            for (name, module), view in zip(modules.items(), views, strict=True)
        }

    def begin_step(self, step: int) -> None:
        """Begin a step: set the sums to zero and draw new projections when it is time for them.

        With `refresh_every = 2`, steps 0 and 1 use draw 0, steps 2 and 3 use draw 1. A call for
        the step that has already begun does nothing, so it cannot lose microbatches.

        Args:
            step: number of optimizer steps made before this one.
        """
        if step == self.step:
            return
        self.step = step
        self.flat.zero_()
        draw = step // self.refresh_every
        if draw != self.draw:
            for layer in self:
                key = projection_key(self.seed, draw, layer.name)
                layer.entries = PROJECTIONS[self.projection](
                    key, self.rank, layer.module.in_features, device=self.flat.device
                )
            self.draw = draw

    def require_step(self) -> None:
        """Raise RuntimeError before the first step has begun, when no projection exists yet."""
        if self.step is None:
            raise RuntimeError(
                "no step has begun, so no projection holds: add the SketchAccumulation callback "
                "(logra_lightning.callbacks) to the Trainer; on the command line, "
                "sketch_accumulation.enabled=true"
            )

    def fingerprint(self) -> str:
        """16 hex digits, which are equal where names, shapes, rank and projections are equal."""
        digest = hashlib.blake2b(digest_size=8)
        for layer in self:
            digest.update(f"{layer.name} {tuple(layer.module.weight.shape)} {self.rank}".encode())
            corner = layer.entries[:4, :64].to(device="cpu", dtype=torch.float32)
            digest.update(corner.numpy().tobytes())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all sums and projections together."""
        projections = sum(layer.entries.nbytes for layer in self)
        return self.flat.nbytes + projections

    def __iter__(self) -> Iterator[SketchedLayer]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, name: str) -> SketchedLayer:
        return self._layers[name]


def _check_rank(modules: dict[str, nn.Linear], rank: int) -> None:
    name, module = min(modules.items(), key=lambda item: item[1].in_features)
    if not 1 <= rank <= module.in_features:
        raise ValueError(
            f"sketch rank must be between 1 and {module.in_features} (in_features of {name!r}), "
            f"got {rank}: set trainer.strategy.init_args.rank, or leave that layer out of "
            f"trainer.strategy.init_args.targets"
        )
