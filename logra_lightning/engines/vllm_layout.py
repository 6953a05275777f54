"""Finds where each weight of a policy lies in the fused, sharded parameters of a vLLM model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from logra_lightning.engines.weights import Block


@dataclass(frozen=True)
class HeldWeight:
    """A weight of the policy, and what one worker of an engine holds of it.

    Args:
        shape: shape of the whole weight, (d, k), (d,), or that of a convolution, (d, 1, w).
        blocks: the parts that this worker holds. It is one block, unless the policy itself fuses
            weights whose rows tensor parallelism deals out among several workers piece by piece.
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
    packed = _packed(model)
    found: dict[str, HeldWeight] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.update(_weights_in(prefix, module, leaf, parameter, packed))
    return found


def _weights_in(
    prefix: str, module: Any, leaf: str, parameter: Any, packed: dict[str, dict[str, int]]
) -> Iterator[tuple[str, HeldWeight]]:
    """The weights of the policy that one parameter of the engine holds."""
    shards = row_shards(module) or [Shard(parameter.shape[0], 0, parameter.shape[0])]
    column, columns, full_columns = _columns(module, parameter)
    parent, _, own = prefix.rpartition(".")
    counts = packed.get(own, {})
    if sum(counts.values()) != len(shards):
        counts = {own: len(shards)}
    left = iter(shards)
    engine_row = 0
    for name, count in counts.items():
        parts = list(islice(left, count))
        before = 0
        rows: list[tuple[int, int, int]] = []  # of each block: engine's first, weight's first, size
        for part in parts:
            row = before + part.start
            if rows and row == rows[-1][1] + rows[-1][2]:  # as one piece it can be shared
                rows[-1] = (*rows[-1][:2], rows[-1][2] + part.size)
            else:
                rows.append((engine_row, row, part.size))
            before, engine_row = before + part.full, engine_row + part.size
        blocks = [Block(f"{prefix}.{leaf}", *place, column, columns) for place in rows]
        shape = (before, *(parameter.shape[1:] if full_columns is None else [full_columns]))
        yield (
            f"{parent}.{name}.{leaf}" if parent else f"{name}.{leaf}",
            HeldWeight(shape, tuple(blocks)),
        )


def _packed(model: Any) -> dict[str, dict[str, int]]:
    """Name of each fused module to the modules of the policy in it, and how many shards each has.

    Most have one. Of `in_proj_qkvz` of a Gated DeltaNet, `in_proj_qkv` has three and `in_proj_z`
    one, which the mapping by which the model loads a checkpoint says.
    """
    stacked: dict[str, tuple[str, Any]] = {}
    for module in model.modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        stacked.update(getattr(mapper, "orig_to_new_stacked", None) or {})
    found = {}
    for fused, names in (getattr(model, "packed_modules_mapping", None) or {}).items():
        counts = {}
        for name in names:
            into, shards = stacked.get(f".{name}", ("", None))
            own = into == f".{fused}" and isinstance(shards, tuple)
            counts[name] = len(shards) if own else 1
        found[fused] = counts
    return found


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
    """First column held, number of columns held, number in all; only a matrix has columns."""
    if parameter.dim() != 2:
        return 0, None, None
    held = parameter.shape[1]
    if any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__):
        return module.tp_rank * held, held, module.input_size
    return 0, held, held
