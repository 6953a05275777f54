"""Finds where each weight of a policy lies in the fused, sharded parameters of a vLLM model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from logra_lightning.engines.weights import Block


@dataclass(frozen=True)
class HeldWeight:
    """A weight of the policy, and what one worker of an engine holds of it.

    Args:
        shape: shape of the whole weight, (d, k) or (d,).
        blocks: the parts that this worker holds. It is one block, unless the policy itself fuses
            weights whose rows tensor parallelism deals out piece by piece.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Shard:
    """The rows of one weight that a worker holds: `size` of its `full` rows, from row `start`."""

    full: int
    start: int
    size: int


def layout_of(model: nn.Module) -> dict[str, HeldWeight]:
    """Name of each weight that the policy must have to what this worker holds of it.

    Every parameter of vLLM's model is covered. The names are those of `transformers`: vLLM's own,
    with fused modules taken apart as the model's `packed_modules_mapping` says (`qkv_proj` into
    `q_proj`, `k_proj`, `v_proj`). A head that is tied to the embedding appears once.

    Args:
        model: the part of vLLM's model that runs in this worker.
    """
    packed = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, HeldWeight] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.update(_weights_in(prefix, module, leaf, parameter, packed))
    return found


def _weights_in(
    prefix: str, module: Any, leaf: str, parameter: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, HeldWeight]]:
    """The weights of the policy that one parameter of the engine holds."""
    shards = row_shards(module) or [Shard(parameter.shape[0], 0, parameter.shape[0])]
    column, columns, full_columns = _columns(module, parameter)
    parent, _, own = prefix.rpartition(".")
    names = packed.get(own, [own])
    if len(names) != len(shards):
        names = [own]
    each = [[shard] for shard in shards] if len(names) == len(shards) else [shards]
    engine_row = 0
    for name, parts in zip(names, each, strict=True):
        before, blocks = 0, []
        for part in parts:
            row = before + part.start
            blocks.append(Block(f"{prefix}.{leaf}", engine_row, row, part.size, column, columns))
            before, engine_row = before + part.full, engine_row + part.size
        shape = (before,) if full_columns is None else (before, full_columns)
        yield (
            f"{parent}.{name}.{leaf}" if parent else f"{name}.{leaf}",
            HeldWeight(shape, tuple(blocks)),
        )


def row_shards(module: Any) -> list[Shard]:
    """The rows that a layer of vLLM holds of each weight it fuses, in the order it fuses them.

    Empty for layers that hold all rows.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "QKVParallelLinear" in kinds:
        heads = module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads
        local = module.num_heads, module.num_kv_heads, module.num_kv_heads
        widths = module.head_size, module.head_size, module.v_head_size
        # Where there are fewer key heads than workers, neighbours hold the same one.
        kv_index = module.tp_rank // module.num_kv_head_replicas
        indices = module.tp_rank, kv_index, kv_index
        return [
            Shard(full * width, index * size * width, size * width)
            for full, size, width, index in zip(heads, local, widths, indices, strict=True)
        ]
    if "MergedColumnParallelLinear" in kinds:
        sizes = module.output_sizes
    elif "ColumnParallelLinear" in kinds:
        sizes = [module.output_size]
    elif "VocabParallelEmbedding" in kinds:
        rows = module.shard_indices
        start, end = rows.org_vocab_start_index, rows.org_vocab_end_index
        return [Shard(module.org_vocab_size, start, end - start)]
    else:
        return []
    return [
        Shard(size, module.tp_rank * (size // module.tp_size), size // module.tp_size)
        for size in sizes
    ]


def _columns(module: Any, parameter: Any) -> tuple[int, int | None, int | None]:
    """First column held, number of columns held, number in all; a vector has no columns."""
    if parameter.dim() == 1:
        return 0, None, None
    held = parameter.shape[1]
    if any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__):
        return module.tp_rank * held, held, module.input_size
    return 0, held, held
