"""`what_trains`: one line that says which weights of a policy are trained, and how."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def what_trains(policy: nn.Module, sketched: Iterable[nn.Module]) -> str:
    """Say the shares of the weights that are sketched, trained densely and frozen.

    For example `trains: 85.3% of 134.5M weights sketched (q_proj, k_proj), 0% dense, 14.7% frozen
    (embed_tokens, norms)`. Weights are told by the last part of their module's name; those of all
    norms are `norms`, all biases `biases`.

    Args:
        policy: the model, with `requires_grad` set on what is trained densely.
        sketched: the layers whose weights are sketched; empty in a dense run.
    """
    by_sketch = {id(layer.weight) for layer in sketched}
    counts = {"sketched": 0, "dense": 0, "frozen": 0}
    kinds: dict[str, dict[str, None]] = {part: {} for part in counts}  # in the order of the model
    for name, param in policy.named_parameters():
        dense = "dense" if param.requires_grad else "frozen"
        part = "sketched" if id(param) in by_sketch else dense
        counts[part] += param.numel()
        kinds[part][_kind(name)] = None
    total = sum(counts.values())
    told = []
    for part, count in counts.items():
        of_all = f" of {_short(total)} weights" if part == "sketched" else ""
        names = f" ({', '.join(kinds[part])})" if kinds[part] else ""
        told.append(f"{_share(count, total)}{of_all} {part}{names}")
    return f"trains: {', '.join(told)}"


def frozen_experts(policy: nn.Module) -> float:
    """The share of a policy's weights that are routed experts and do not train.

    The experts of a layer are usually one parameter of three dimensions, which no sketch takes.

    Args:
        policy: the model, with `requires_grad` set on all that trains.
    """
    total = sum(param.numel() for param in policy.parameters())
    frozen = (
        param.numel()
        for name, param in policy.named_parameters()
        if "experts" in name.split(".") and not param.requires_grad
    )
    return sum(frozen) / total


def _kind(name: str) -> str:
    """What a weight is called, by its name: `layers.0.mlp.up_proj.weight` is an `up_proj`."""
    module, _, last = name.rpartition(".")
    leaf = module.rpartition(".")[2] or last
    return "biases" if last == "bias" else "norms" if "norm" in leaf.lower() else leaf


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if count else "0%"


def _short(count: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
