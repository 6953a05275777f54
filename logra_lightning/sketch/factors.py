"""`Factors`: one update as everyone merges it, and the merge itself (rows 8 and 9).

A GEMM's bits depend on its shape, so the merge runs tile by tile on a fixed grid: whoever holds the
whole weight, some of its rows or a fused copy of it ends with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from logra_lightning.sketch.master import join, split

TILE_ROWS = 256
TILE_COLUMNS = 512


@dataclass(frozen=True)
class Factors:
    """One update of all sketched weights: `W <- decay * W - D A` for each.

    Args:
        version: optimizer steps completed before this one.
        seed: base seed of the projections.
        draw: which draw of the projections the update belongs to.
        rank: r.
        decay: scalar that multiplies every sketched weight first, in fp32.
        directions: name of the weight's module to D [d, r] bf16, step scale included.
    """

    version: int
    seed: int
    draw: int
    rank: int
    decay: float
    directions: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all directions."""
        return sum(d.nbytes for d in self.directions.values())


@torch.no_grad()
def merge_(
    weight: Tensor,
    direction: Tensor,
    entries: Tensor,
    *,
    decay: float = 1.0,
    residual: Tensor | None = None,
) -> None:
    """`W <- decay * W - D A` in fp32, in place, on the tile grid.

    Args:
        weight: [d, k] fp32, or bf16 together with `residual`. Its first row and column must lie on
            the grid of the whole weight.
        direction: D [d, r] bf16.
        entries: [r, k], the projection times sqrt(r).
        decay: scalar applied before the merge.
        residual: [d, k] int16, low half of the master of a bf16 weight.

    Raises:
        ValueError: a bf16 weight without a residual, or another dtype.
    """
    if weight.dtype != (torch.float32 if residual is None else torch.bfloat16):
        raise ValueError(
            f"a weight to merge into is fp32, or bf16 with a residual; got {weight.dtype} "
            f"{'without' if residual is None else 'with'} a residual"
        )
    rows, columns = weight.shape
    scale = entries.shape[0] ** -0.5
    with torch.autocast(weight.device.type, enabled=False), _full_precision():
        right = [
            _padded(entries[:, c : c + TILE_COLUMNS].to(torch.float32), columns=TILE_COLUMNS)
            for c in range(0, columns, TILE_COLUMNS)
        ]
        for r in range(0, rows, TILE_ROWS):
            left = direction[r : r + TILE_ROWS].to(torch.float32)
            left = _padded(left, rows=TILE_ROWS)
            for c, block in zip(range(0, columns, TILE_COLUMNS), right, strict=True):
                part = (slice(r, r + TILE_ROWS), slice(c, c + TILE_COLUMNS))
                tile = weight[part] if residual is None else join(weight[part], residual[part])
                height, width = tile.shape
                tile = _padded(tile * decay, rows=TILE_ROWS, columns=TILE_COLUMNS)
                tile = tile.addmm_(left, block, alpha=-scale)[:height, :width]
                if residual is None:
                    weight[part] = tile
                else:
                    weight[part], residual[part] = split(tile.contiguous())


def _padded(x: Tensor, *, rows: int | None = None, columns: int | None = None) -> Tensor:
    """`x` with zero rows and columns appended up to the tile's shape."""
    extra_rows = (rows or x.shape[0]) - x.shape[0]
    extra_columns = (columns or x.shape[1]) - x.shape[1]
    if extra_rows == 0 and extra_columns == 0:
        return x
    return pad(x, (0, extra_columns, 0, extra_rows))


class _full_precision:
    """fp32 matrix products without TF32 or bf16 passes, whatever the user chose."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)
