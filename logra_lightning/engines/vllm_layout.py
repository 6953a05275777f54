"""Where each weight of a policy lies in the fused, sharded parameters of a vLLM model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from logra_lightning.engines.weights import Block


@dataclass(frozen=True)
class Source:
    """A weight of the policy as an engine expects it.

    Args:
        shape: of the whole weight.
        blocks: what this worker holds of it.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Shard:
    """Rows of one source that a worker holds: `start` and `size` of `full`."""

    full: int
    start: int
    size: int


def layout_of(model: nn.Module) -> dict[str, Source]:
    """Name of each policy's weight to what the worker holds of it.

    Covers every parameter of the model, in the names of `transformers`: those of vLLM, with fused
    modules taken apart as `packed_modules_mapping` says. A tied head appears once.
    """
    packed = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, Source] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.update(_sources(prefix, module, leaf, parameter, packed))
    return found


def _sources(
    prefix: str, module: Any, leaf: str, parameter: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Source]]:
    shards = row_shards(module) or [Shard(parameter.shape[0], 0, parameter.shape[0])]
    column, columns, full_columns = _columns(module, parameter)
    parent, _, own = prefix.rpartition(".")
    names = packed.get(own, [own])
    if len(names) != len(shards):
        names = [own]
    each = [[shard] for shard in shards] if len(names) == len(shards) else [shards]
    target = 0
    for name, parts in zip(names, each, strict=True):
        before, blocks = 0, []
        for part in parts:
            row = before + part.start
            blocks.append(Block(f"{prefix}.{leaf}", target, row, part.size, column, columns))
            before, target = before + part.full, target + part.size
        shape = (before,) if full_columns is None else (before, full_columns)
        yield (
            f"{parent}.{name}.{leaf}" if parent else f"{name}.{leaf}",
            Source(shape, tuple(blocks)),
        )


def row_shards(module: Any) -> list[Shard]:
    """Rows of each source in the order in which a layer fuses them; empty for other layers."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "QKVParallelLinear" in kinds:
        heads = module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads
        local = module.num_heads, module.num_kv_heads, module.num_kv_heads
        widths = module.head_size, module.head_size, module.v_head_size
        ranks = module.tp_rank, *(2 * [module.tp_rank // module.num_kv_head_replicas])
        return [
            Shard(full * width, rank * size * width, size * width)
            for full, size, width, rank in zip(heads, local, widths, ranks, strict=True)
        ]
    if "MergedColumnParallelLinear" in kinds:
        sizes = module.output_sizes
    elif "ColumnParallelLinear" in kinds:
        sizes = [module.output_size]
    elif "VocabParallelEmbedding" in kinds:
        indices = module.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return [Shard(module.org_vocab_size, start, end - start)]
    else:
        return []
    return [
        Shard(size, module.tp_rank * (size // module.tp_size), size // module.tp_size)
        for size in sizes
    ]


def _columns(module: Any, parameter: Any) -> tuple[int, int | None, int | None]:
    """First column, columns held, columns in all; a vector has none."""
    if parameter.dim() == 1:
        return 0, None, None
    held = parameter.shape[1]
    if any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__):
        return module.tp_rank * held, held, module.input_size
    return 0, held, held
