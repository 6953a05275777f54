"""Merging factors: the formula, and the same bits for a whole weight, its rows or a fused copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from logra_lightning.sketch import merge_, rademacher
from logra_lightning.sketch.factors import TILE_ROWS
from logra_lightning.sketch.master import join, split

CPU = torch.device("cpu")


def case(rows: int, columns: int, rank: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns, generator=generator)
    direction = torch.randn(rows, rank, generator=generator).to(torch.bfloat16) * 0.01
    return weight, direction, rademacher(11, rank, columns, device=CPU)


@pytest.mark.parametrize("shape", [(3, 8), (256, 512), (300, 700), (600, 1025)])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_merge_is_decay_times_weight_minus_product(shape: tuple[int, int], decay: float) -> None:
    weight, direction, entries = case(*shape)
    a = entries.to(torch.float64) / 8**0.5
    expected = weight.to(torch.float64) * decay - direction.to(torch.float64) @ a
    merge_(weight, direction, entries, decay=decay)
    torch.testing.assert_close(weight.to(torch.float64), expected, rtol=1e-6, atol=1e-6)


def test_rows_merged_alone_equal_the_whole_bit_for_bit() -> None:
    weight, direction, entries = case(3 * TILE_ROWS + 5, 700)
    shard = weight[TILE_ROWS : 2 * TILE_ROWS].clone()
    fused = torch.cat([torch.zeros(40, 700), weight])[40:]  # rows of a larger, fused weight
    merge_(weight, direction, entries)
    merge_(shard, direction[TILE_ROWS : 2 * TILE_ROWS], entries)
    merge_(fused, direction, entries)
    assert torch.equal(shard, weight[TILE_ROWS : 2 * TILE_ROWS])
    assert torch.equal(fused, weight)


def test_bf16_with_a_residual_equals_fp32_bit_for_bit() -> None:
    master, direction, entries = case(300, 700)
    weight, residual = split(master.clone())
    for _ in range(3):
        merge_(master, direction, entries, decay=0.99)
        merge_(weight, direction, entries, decay=0.99, residual=residual)
    assert torch.equal(join(weight, residual), master)


def test_small_updates_add_up_in_bf16() -> None:
    weight, residual = split(torch.ones(4, 8))
    direction = torch.full((4, 1), 1e-4, dtype=torch.bfloat16)
    entries = torch.ones(1, 8, dtype=torch.int8)
    for _ in range(1000):
        merge_(weight, direction, entries, residual=residual)
    expected = 1 - 1000 * direction[0, 0].item()
    torch.testing.assert_close(join(weight, residual), torch.full((4, 8), expected))


def test_bf16_without_a_residual_is_refused() -> None:
    weight, direction, entries = case(4, 8)
    with pytest.raises(ValueError, match="without a residual"):
        merge_(weight.to(torch.bfloat16), direction, entries)


def test_precision_setting_of_the_user_survives() -> None:
    weight, direction, entries = case(4, 8)
    torch.set_float32_matmul_precision("medium")
    try:
        merge_(weight, direction, entries)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
