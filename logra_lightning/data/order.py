"""Orders of prompts as pure functions of a seed and a position; no global random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from logra_lightning.seeding import derive_seed


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The permutation of `size` prompts in one epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, "order"))
    return torch.randperm(size, generator=generator).tolist()


def quotas(weights: Sequence[float], length: int) -> list[int]:
    """How many of `length` prompts each source gives: its share, rounded to the largest remainder.

    Args:
        weights: of the sources, relative to each other.
        length: prompts in all, which is the sum of the result.
    """
    shares = [length * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    for i in by_remainder[: length - sum(whole)]:
        whole[i] += 1
    return whole


def interleaved(
    sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int, length: int
) -> list[int]:
    """Positions of the `length` prompts of one epoch, sources evenly mixed by their weights.

    Each source gives its quota in every epoch and walks through permutations of its own: prompt j
    of epoch e is number `e * quota + j` of that walk, wherever the source's own passes end.

    Args:
        sizes: prompts of each source; they stand one source after the other.
        weights: of the sources, relative to each other.
        seed: of the permutations.
        epoch: counted from 0.
        length: prompts of every epoch.
    """
    placed: list[tuple[float, int, int]] = []
    offset = 0
    for source, (size, quota) in enumerate(zip(sizes, quotas(weights, length), strict=True)):
        walk = _walk(size, derive_seed(seed, source, "source"), epoch * quota, quota)
        placed += [((j + 0.5) / quota, source, offset + at) for j, at in enumerate(walk)]
        offset += size
    return [position for _, _, position in sorted(placed)]


def drawn(
    sizes: Sequence[int], weights: Sequence[float] | None, count: int, seed: int
) -> list[int]:
    r"""Positions of `count` different prompts, drawn at random.

    The `count` largest of :math:`\log(u_i) / w_i`, u uniform, are a draw without replacement with
    probabilities in proportion to w (Efraimidis and Spirakis, 2006).

    Args:
        sizes: prompts of each source.
        weights: of the sources; None draws all prompts alike.
        count: how many.
        seed: of the draw.
    """
    each = [1.0] * len(sizes)
    if weights is not None:
        each = [weight / max(1, size) for weight, size in zip(weights, sizes, strict=True)]
    chances = torch.tensor(each, dtype=torch.float64, device="cpu")
    chances = chances.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device="cpu"))
    generator = torch.Generator().manual_seed(derive_seed(seed, "refill"))
    uniform = torch.rand(len(chances), generator=generator, dtype=torch.float64, device="cpu")
    return (uniform.log() / chances).topk(count).indices.tolist()


def _walk(size: int, seed: int, start: int, count: int) -> list[int]:
    """Numbers `start` to `start + count` of one permutation of `size` after the other."""
    found: list[int] = []
    while len(found) < count:
        epoch, at = divmod(start + len(found), size)
        found += shuffled(size, seed, epoch)[at : at + count - len(found)]
    return found
