"""Weights on their way from the policy to an engine, and a checksum that compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.sketch.master import join
from logra_lightning.sketch.projection import canonical_name

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
_PIECE = 1 << 18  # elements hashed at a time


def named_parameters(policy: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """The policy's parameters with the names that engines know, without wrappers' parts."""
    return ((canonical_name(name), p) for name, p in policy.named_parameters())


@dataclass(frozen=True)
class PolicyWeight:
    """A whole weight of the policy, as it is given to an engine.

    Args:
        name: name of the parameter in the policy, as `named_parameters` gives it.
        tensor: [d, k] or [d], fp32 or bf16.
        residual: [d, k] int16, the low half of the fp32 master of a bf16 weight; None if there is
            no master, or if `tensor` is the master itself.
        projection: name of the projection by which factors will update this weight; None if it
            will only ever be replaced.
    """

    name: str
    tensor: Tensor
    residual: Tensor | None = None
    projection: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and residual."""
        return self.tensor.nbytes + (0 if self.residual is None else self.residual.nbytes)


@dataclass(frozen=True)
class Block:
    """A block of one weight of the policy, and the rows of an engine's parameter that hold it.

    An engine fuses weights: the key projection, [64, 128], may lie in the rows 128 to 191 of
    `qkv_proj.weight`. The block is then `Block("...qkv_proj.weight", 128, 0, 64, 0, 128)`.

    Args:
        parameter: name of the engine's parameter.
        engine_row: row of the engine's parameter where the block begins.
        row: row of the policy's weight where the block begins.
        rows: number of rows.
        column: column of the policy's weight where the block begins.
        columns: number of columns; None for what is no matrix.
    """

    parameter: str
    engine_row: int
    row: int
    rows: int
    column: int
    columns: int | None

    def of(self, weight: Tensor) -> Tensor:
        """The block of a weight of the policy, as a view."""
        part = weight[self.row : self.row + self.rows]
        if self.columns is None:
            return part
        return part[:, self.column : self.column + self.columns]

    def place(self, parameter: Tensor) -> Tensor:
        """The rows of the engine's parameter where the block lies, as a view."""
        return parameter[self.engine_row : self.engine_row + self.rows]


@torch.no_grad()
def checksum(weight: Tensor, residual: Tensor | None = None) -> int:
    """A 64-bit number that changes if any bit of a weight does, or if two elements change places.

    It is the same on every device, and for a master whether it comes as fp32 or in two halves.
    Rows are hashed in pieces, so that a large weight needs little memory.

    Args:
        weight: [d, k] or [d], fp32 or bf16.
        residual: [d, k] int16, the low half of the fp32 master whose high half `weight` is; None
            if `weight` is hashed alone.
    """
    total, position = 0, 0
    piece = max(1, _PIECE // max(1, weight.shape[1:].numel()))
    for row in range(0, weight.shape[0], piece):
        part = weight[row : row + piece]
        if residual is not None:
            part = join(part, residual[row : row + piece])
        count = -(-part.nbytes // 8)
        words = torch.zeros(count, dtype=torch.int64, device=weight.device)
        words.view(part.dtype)[: part.numel()] = part.reshape(-1)
        place = torch.arange(position, position + count, dtype=torch.int64, device=weight.device)
        words.bitwise_xor_(place.mul_(_MULTIPLIER))
        words.mul_(_MULTIPLIER)
        # Not linear: in a plain sum of multiples two flipped bits could cancel.
        for shift in (32, 29):
            words.bitwise_xor_(words >> shift).mul_(_MULTIPLIER)
        total += int(words.sum().item())
        position += count
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
