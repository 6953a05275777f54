"""Checksums see every bit and its place, and are the same for a master in either form."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.engines.weights import Block, PolicyWeight, checksum
from logra_lightning.sketch.master import split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 8)])
def test_every_bit_and_its_place_count(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(weight)
    assert checksum(weight.clone()) == before
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    seen = {before}
    for position in range(weight.numel()):
        for bit in range(torch.iinfo(bits).bits):
            changed = weight.clone()
            changed.view(-1).view(bits)[position] ^= torch.tensor(1, dtype=torch.int64) << bit
            seen.add(checksum(changed))
    assert len(seen) == 1 + weight.numel() * torch.iinfo(bits).bits
    swapped = weight.clone()
    swapped.view(-1)[[0, 1]] = weight.view(-1)[[1, 0]]
    assert checksum(swapped) not in seen


def test_a_master_has_one_checksum_in_both_forms() -> None:
    master = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    weight, residual = split(master)
    assert checksum(weight, residual) == checksum(master)
    assert checksum(weight) != checksum(master)


def test_pieces_do_not_change_the_checksum_of_views() -> None:
    weight = torch.randn(1100, 1000, generator=torch.Generator().manual_seed(0))  # two pieces
    assert checksum(weight[:, 1:]) == checksum(weight[:, 1:].contiguous())


def test_a_block_is_a_view_of_both_sides() -> None:
    block = Block("p", engine_row=4, row=1, rows=2, column=3, columns=5)
    weight, parameter = torch.arange(40.0).view(4, 10), torch.zeros(8, 5)
    block.place(parameter).copy_(block.of(weight))
    assert torch.equal(parameter[4:6], weight[1:3, 3:8])
    vector = Block("p", engine_row=0, row=1, rows=2, column=0, columns=None)
    assert torch.equal(vector.of(torch.arange(4)), torch.tensor([1, 2]))


def test_bytes_count_the_residual() -> None:
    weight, residual = split(torch.ones(3, 4))
    assert PolicyWeight("w", weight).nbytes == 24
    assert PolicyWeight("w", weight, residual, "w").nbytes == 48
