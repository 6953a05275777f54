"""The layout of fused and sharded weights, by hand; vLLM's own is checked in test_vllm_engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logra_lightning.engines.vllm_layout import layout_of, row_shards


class QKVParallelLinear(nn.Module):
    """Attributes as vLLM's layer of this name has them."""

    def __init__(self, index: int, size: int, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = index, size
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.num_heads, self.num_kv_heads = heads // size, max(1, kv_heads // size)
        self.num_kv_head_replicas = max(1, size // kv_heads)
        self.head_size = self.v_head_size = width
        rows = (self.num_heads + 2 * self.num_kv_heads) * width
        self.weight = nn.Parameter(torch.zeros(rows, 10))
        self.bias = nn.Parameter(torch.zeros(rows))


class MergedColumnParallelLinear(nn.Module):
    def __init__(self, index: int, size: int, sizes: list[int]) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.output_sizes = index, size, sizes
        self.weight = nn.Parameter(torch.zeros(sum(sizes) // size, 10))


class RowParallelLinear(nn.Module):
    def __init__(self, index: int, size: int, columns: int) -> None:
        super().__init__()
        self.tp_rank, self.input_size = index, columns
        self.weight = nn.Parameter(torch.zeros(10, columns // size))


class VocabParallelEmbedding(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        start, end = ((0, 32), (32, 61))[index]
        self.org_vocab_size = 61
        self.shard_indices = type("", (), {"org_vocab_start_index": start})()
        self.shard_indices.org_vocab_end_index = end
        self.weight = nn.Parameter(torch.zeros(32, 10))


class Model(nn.Module):
    def __init__(self, index: int, size: int, kv_heads: int = 2) -> None:
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q", "k", "v"], "gate_up_proj": ["gate", "up"]}
        self.embed = VocabParallelEmbedding(index)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed.weight
        self.attn = nn.Module()
        self.attn.qkv_proj = QKVParallelLinear(index, size, 4, kv_heads, 3)
        self.attn.o_proj = RowParallelLinear(index, size, 12)
        self.gate_up_proj = MergedColumnParallelLinear(index, size, [8, 8])
        self.norm = nn.LayerNorm(10, bias=False)


def whole() -> dict[str, Tensor]:
    """The policy's weights: every element is another number."""
    shapes = {"embed": (61, 10), "attn.q": (12, 10), "attn.o_proj": (10, 12), "gate": (8, 10)}
    shapes |= {"up": (8, 10)}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    weights |= {"norm.weight": (10,), "attn.q.bias": (12,)}  # type: ignore[dict-item]
    numbers = iter(range(10_000))
    return {
        name: torch.tensor([next(numbers) for _ in range(torch.Size(shape).numel())]).view(shape)
        for name, shape in weights.items()
    }


@pytest.mark.parametrize("index", [0, 1])
def test_two_workers_hold_their_rows_and_columns(index: int) -> None:
    layout = layout_of(Model(index, 2))
    held = {
        name: [block.of(weight) for block in layout[name].blocks]
        for name, weight in whole().items()
    }
    weights = whole()
    for name, weight in weights.items():
        assert layout[name].shape == weight.shape, name
    expected: dict[str, Any] = {
        "embed.weight": weights["embed.weight"][32 * index : 32 * (index + 1)],
        "attn.q.weight": weights["attn.q.weight"].chunk(2)[index],
        "attn.q.bias": weights["attn.q.bias"].chunk(2)[index],
        "attn.o_proj.weight": weights["attn.o_proj.weight"].chunk(2, dim=1)[index],
        "gate.weight": weights["gate.weight"].chunk(2)[index],
        "up.weight": weights["up.weight"].chunk(2)[index],
        "norm.weight": weights["norm.weight"],
    }
    for name, tensor in expected.items():
        (block,) = held[name]
        assert torch.equal(block, tensor), name
    assert "lm_head.weight" not in layout


def test_fused_rows_follow_one_another() -> None:
    layout = layout_of(Model(0, 1))
    starts = [layout[f"attn.{name}.weight"].blocks[0].engine_row for name in "qkv"]
    assert starts == [0, 12, 18]
    assert [layout[f"{name}.weight"].blocks[0].engine_row for name in ("gate", "up")] == [0, 8]


def test_key_heads_that_are_fewer_than_workers_are_held_twice() -> None:
    starts = []
    for index in range(4):
        shards = row_shards(QKVParallelLinear(index, 4, heads=4, kv_heads=2, width=3))
        assert [shard.size for shard in shards] == [3, 3, 3]
        starts.append([shard.start for shard in shards])
    assert starts == [[0, 0, 0], [3, 0, 0], [6, 3, 3], [9, 3, 3]]


def test_a_policy_may_fuse_them_as_the_engine_does() -> None:
    """Phi-3 has one `qkv_proj`; under tensor parallelism its rows are three pieces."""
    model = Model(1, 2)
    model.packed_modules_mapping = {}
    held = layout_of(model)["attn.qkv_proj.weight"]
    assert held.shape == (24, 10)
    pieces = [(block.row, block.rows, block.engine_row) for block in held.blocks]
    assert pieces == [(6, 6, 0), (15, 3, 6), (21, 3, 9)]


def test_what_one_worker_holds_of_it_is_one_piece_that_can_be_shared() -> None:
    """Phi-3's `qkv_proj`, and `in_proj_qkv` beside `in_proj_z` in `in_proj_qkvz` of Qwen3.5."""
    model = Model(0, 1)
    model.packed_modules_mapping = {}
    (block,) = layout_of(model)["attn.qkv_proj.weight"].blocks
    assert (block.row, block.rows, block.engine_row) == (0, 24, 0)
