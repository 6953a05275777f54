"""Weights on their way from the policy to an engine: `PolicyWeight`, `Block`, `checksum`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lightning.sketch.master import join

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
_PIECE = 1 << 18  # elements hashed at a time


@dataclass(frozen=True)
class PolicyWeight:
    """A weight of the policy, as it is given to an engine.

    Args:
        name: as `policy.named_parameters()` has it.
        tensor: [d, k] or [d], fp32 or bf16.
        residual: [d, k] int16, low half of the fp32 master of a bf16 weight.
        projection: name of its projection, where updates will come as factors; else None.
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
    """A block of a policy's weight, and where it lies in a parameter of the engine.

    Args:
        parameter: name of the engine's parameter.
        target_row: row of the parameter where the block begins.
        row: first row of the policy's weight.
        rows: how many.
        column: first column of the policy's weight.
        columns: how many; None for a vector.
    """

    parameter: str
    target_row: int
    row: int
    rows: int
    column: int
    columns: int | None

    def of(self, weight: Tensor) -> Tensor:
        """The block of the policy's weight, a view."""
        part = weight[self.row : self.row + self.rows]
        if self.columns is None:
            return part
        return part[:, self.column : self.column + self.columns]

    def place(self, parameter: Tensor) -> Tensor:
        """Where the block lies in the engine's parameter, a view."""
        return parameter[self.target_row : self.target_row + self.rows]


@torch.no_grad()
def checksum(weight: Tensor, residual: Tensor | None = None) -> int:
    """A number that changes with any bit of a weight, or of its master, and with their order.

    The same on every device. Memory is bounded: it goes by pieces of rows.

    Args:
        weight: [d, k] or [d], fp32 or bf16.
        residual: the other half of its master.
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
