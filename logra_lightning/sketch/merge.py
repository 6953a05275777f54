"""`merge_`: `W <- decay * W - D A` with the same bits everywhere (row 8 of docs/method.md).

The bits of a matrix product depend on its shape: a few rows computed alone can differ from the same
rows of the whole product. So `D A` is computed in tiles that start at multiples of `TILE` in the
whole weight. A weight with 5000 rows has tiles of rows 0-2047, 2048-4095 and 4096-4999, and columns
are cut alike. A shard that holds rows 2500-4999 computes the last two tiles whole, with zeros for
the rows 2048-2499 that it lacks, and keeps its own rows. So a process with the whole weight, with
some rows, with some columns, or with a fused copy ends with the same bits. What follows the product
is elementwise, and its bits do not depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from logra_lightning.sketch.master import join, split_
from logra_lightning.sketch.precision import full_precision

# Rows and columns of a tile. Most matrices of small models are one tile, and of a large matrix
# there is never a whole copy in fp32 (one tile is 16 MiB).
TILE = 2048

# Elements that a CPU subtracts at a time: 1 MiB in fp32, so that they stay in its cache.
_CHUNK = 1 << 18


@torch.no_grad()
def merge_(
    weight: Tensor,
    direction: Tensor,
    entries: Tensor,
    *,
    decay: float = 1.0,
    residual: Tensor | None = None,
    origin: tuple[int, int] = (0, 0),
    shape: tuple[int, int] | None = None,
) -> None:
    """Compute `W <- decay * W - D A` in fp32, in place, for a whole weight or a block of one.

    For example the second half of a weight [5000, 4096] is merged with `weight` [2500, 4096],
    `origin=(2500, 0)` and `shape=(5000, 4096)`.

    Args:
        weight: [d, k] fp32, or bf16 together with `residual`; the whole weight or a block of it.
        direction: D [d, r] bf16, the rows that belong to the rows of `weight`.
        entries: [r, k], `A * sqrt(r)`, the columns that belong to the columns of `weight`.
        decay: the weight is multiplied by it before the subtraction.
        residual: [d, k] int16, the low 16 bits of a bf16 weight's fp32 master.
        origin: row and column in the whole weight where `weight` begins.
        shape: rows and columns of the whole weight; None where `weight` is the whole.

    Raises:
        ValueError: `weight` is neither fp32 nor bf16 with a residual.
    """
    if weight.dtype != (torch.float32 if residual is None else torch.bfloat16):
        raise ValueError(
            f"a weight to merge into is fp32, or bf16 with a residual; got {weight.dtype} "
            f"{'without' if residual is None else 'with'} a residual"
        )
    whole = shape or (weight.shape[0], weight.shape[1])
    if weight.numel() == 0:  # a shard without rows
        return
    with full_precision(weight.device):
        left = direction.to(torch.float32) * entries.shape[0] ** -0.5
        for columns, across, width in _tiles(origin[1], weight.shape[1], whole[1]):
            right = entries.new_zeros(entries.shape[0], width, dtype=torch.float32)
            right[:, across] = entries[:, columns]
            for rows, down, height in _tiles(origin[0], weight.shape[0], whole[0]):
                tile = left.new_zeros(height, left.shape[1])
                tile[down] = left[rows]
                product = torch.mm(tile, right)[down, across]
                low = None if residual is None else residual[rows, columns]
                _subtract_(weight[rows, columns], low, product, decay)


def _tiles(origin: int, length: int, total: int) -> Iterator[tuple[slice, slice, int]]:
    """The tiles that a block touches along one dimension.

    A block of 2500 rows that begins at row 2500 of 5000 gives (0:1596, 452:2048, 2048) and
    (1596:2500, 0:904, 904).

    Yields:
        Slice of the block, where that slice lies in its tile, and the size of the tile.
    """
    for start in range(origin // TILE * TILE, origin + length, TILE):
        size = min(TILE, total - start)
        first, last = max(start, origin), min(start + size, origin + length)
        yield slice(first - origin, last - origin), slice(first - start, last - start), size


def _subtract_(weight: Tensor, residual: Tensor | None, product: Tensor, decay: float) -> None:
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns) if weight.device.type == "cpu" else rows
    for first in range(0, rows, step):
        part = slice(first, first + step)
        master = weight[part] if residual is None else join(weight[part], residual[part])
        if decay != 1.0:
            master.mul_(decay)
        master.sub_(product[part])
        if residual is not None:
            split_(master, weight[part], residual[part])
