"""Merging factors: the formula, and the same bits for a whole weight, rows, columns or a copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import logra_lightning.sketch.merge as merge
from logra_lightning.sketch import merge_, rademacher
from logra_lightning.sketch.master import join, split

CPU = torch.device("cpu")


@pytest.fixture(params=[64, 2048])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Many tiles, uneven at the edges, and one tile for all."""
    monkeypatch.setattr(merge, "TILE", request.param)
    monkeypatch.setattr(merge, "_CHUNK", 5000)
    return request.param


def case(rows: int, columns: int, rank: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns, generator=generator)
    direction = torch.randn(rows, rank, generator=generator).to(torch.bfloat16) * 0.01
    return weight, direction, rademacher(11, rank, columns, device=CPU)


@pytest.mark.parametrize("shape", [(3, 8), (64, 128), (130, 300), (200, 129)])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_merge_is_decay_times_weight_minus_product(
    tile: int, shape: tuple[int, int], decay: float
) -> None:
    weight, direction, entries = case(*shape)
    a = entries.to(torch.float64) / 8**0.5
    expected = weight.to(torch.float64) * decay - direction.to(torch.float64) @ a
    merge_(weight, direction, entries, decay=decay)
    torch.testing.assert_close(weight.to(torch.float64), expected, rtol=1e-6, atol=1e-6)


# Uneven shards of rows, as FSDP makes them; even ones, as tensor parallelism makes them.
@pytest.mark.parametrize("sizes", [[67, 66, 66], [1, 63, 135], [100, 99], [199]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 48])
def test_row_shards_equal_the_whole_bit_for_bit(
    tile: int, sizes: list[int], dtype: torch.dtype, rank: int
) -> None:
    check_shards(sizes, 0, dtype, rank)


@pytest.mark.parametrize("sizes", [[100, 100], [51, 149], [64, 64, 72], [7, 193]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 48])
def test_column_shards_equal_the_whole_bit_for_bit(
    tile: int, sizes: list[int], dtype: torch.dtype, rank: int
) -> None:
    check_shards(sizes, 1, dtype, rank)


def check_shards(sizes: list[int], dim: int, dtype: torch.dtype, rank: int) -> None:
    shape = (sum(sizes), 150) if dim == 0 else (150, sum(sizes))
    master, direction, entries = case(*shape, rank)
    whole = master.clone()
    merge_(whole, direction, entries, decay=0.99)
    start = 0
    for size, part in zip(sizes, master.split(sizes, dim=dim), strict=True):
        held = slice(start, start + size)
        origin = (start, 0) if dim == 0 else (0, start)
        shard = part.clone()
        weight, residual = split(shard) if dtype == torch.bfloat16 else (shard, None)
        merge_(
            weight,
            direction[held] if dim == 0 else direction,
            entries if dim == 0 else entries[:, held],
            decay=0.99,
            residual=residual,
            origin=origin,
            shape=shape,
        )
        merged = weight if residual is None else join(weight, residual)
        assert torch.equal(merged, whole.narrow(dim, start, size))
        start += size


def test_rows_of_a_fused_weight_equal_the_whole_bit_for_bit(tile: int) -> None:
    weight, direction, entries = case(199, 150)
    fused = torch.cat([torch.zeros(3, 150), weight, torch.zeros(5, 150)])
    merge_(weight, direction, entries)
    merge_(fused[3:-5], direction, entries)
    assert torch.equal(fused[3:-5], weight)
    assert not fused[:3].any()
    assert not fused[-5:].any()


def test_bits_do_not_depend_on_the_callers_precision_threads_or_autocast() -> None:
    weight, direction, entries = case(300, 700, 64)
    expected = weight.clone()
    merge_(expected, direction, entries)
    threads = torch.get_num_threads()
    for name in ("medium", "high", "autocast", "one thread"):
        got = weight.clone()
        try:
            if name in ("medium", "high"):
                torch.set_float32_matmul_precision(name)
            if name == "one thread":
                torch.set_num_threads(1)
            with torch.autocast("cpu", enabled=name == "autocast"):
                merge_(got, direction, entries)
            if name in ("medium", "high"):  # and the caller's choice survives
                assert torch.get_float32_matmul_precision() == name
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.set_num_threads(threads)
        assert torch.equal(got, expected), name


def test_bf16_with_a_residual_equals_fp32_bit_for_bit_after_300_merges() -> None:
    master, _, entries = case(60, 70)
    weight, residual = split(master)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        direction = torch.randn(60, 8, generator=generator).to(torch.bfloat16) * 1e-3
        merge_(master, direction, entries, decay=0.999)
        merge_(weight, direction, entries, decay=0.999, residual=residual)
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
