"""`merge_`: `W <- decay * W - D A`, with the same bits wherever it is done (row 8, decision 5.5).

A GEMM's bits depend on its shape. So the product is made tile by tile on a grid that is anchored in
the whole weight: whoever holds all of it, some rows, some columns or a fused copy ends with the
same bits. The rest is elementwise, one rounding at a time, and may be cut in any way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from logra_lightning.sketch.master import join, split_
from logra_lightning.sketch.precision import full_precision

# Large enough that most matrices of small models are one tile, small enough that no fp32 copy of a
# large matrix ever exists.
TILE = 2048

# Elements that a CPU works on at a time, so that the passes over them stay in its cache.
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
    """`W <- decay * W - D A` in fp32, in place, for a whole weight or a block of it.

    Args:
        weight: [d, k] fp32, or bf16 together with `residual`.
        direction: D [d, r] bf16, of the rows of `weight`.
        entries: [r, k], the projection times sqrt(r), of the columns of `weight`.
        decay: scalar applied first.
        residual: [d, k] int16, low half of the master of a bf16 weight.
        origin: row and column of the first element of `weight` in the whole weight.
        shape: of the whole weight; that of `weight` when left out.

    Raises:
        ValueError: a bf16 weight without a residual, or another dtype.
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
    """Along one dimension: part of what is held, its place in the tile, size of the tile."""
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
