"""Orders of prompts, computed from a seed and an epoch alone, without global random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from logra_lightning.seeding import derive_seed


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """Return the positions 0 to `size - 1` in the order of one epoch.

    Args:
        size: number of prompts.
        seed: another seed gives unrelated permutations.
        epoch: counted from 0; each has a permutation of its own.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, "order"))
    return torch.randperm(size, generator=generator).tolist()


def quotas(weights: Sequence[float], length: int) -> list[int]:
    """Return how many of `length` prompts each source gives, in proportion to its weight.

    Shares are rounded down, and the prompts still missing come from the sources that lost most:
    `quotas([2.0, 1.0], 10)` has shares `[6.67, 3.33]` and returns `[7, 3]`.

    Args:
        weights: share of each source, relative to the others.
        length: number of prompts of all sources together, the sum of the result.
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
    """Return the positions of the `length` prompts of one epoch, sources evenly mixed by weight.

    Sizes `[3, 8]` put source a at positions 0 to 2 and source b at 3 to 10. Weights `[2.0, 1.0]`
    and length 9 take six prompts of a and three of b, in the order `a b a a b a a b a`.

    Each source walks through permutations of its own prompts and goes on in the next epoch where it
    stopped in this one: with quota q, its prompts of epoch e are numbers `e * q` to
    `(e + 1) * q - 1` of its walk. So a, with q = 6, is passed twice in each epoch, and b, with
    q = 3, is through after two epochs and two prompts of the third.

    Args:
        sizes: number of prompts of each source; sources stand one after the other.
        weights: share of each source, relative to the others.
        seed: another seed gives unrelated permutations.
        epoch: counted from 0.
        length: number of prompts in each epoch.
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
    r"""Return the positions of `count` different prompts, drawn at random by weight.

    Prompt i gets the number :math:`\log(u_i) / w_i`, where :math:`u_i` is uniform on (0, 1) and
    :math:`w_i` is the weight of its source divided by the size of the source. The `count` largest
    numbers are a draw without replacement with probabilities in proportion to :math:`w_i`.

    Args:
        sizes: number of prompts of each source; sources stand one after the other.
        weights: share of each source, relative to the others; None draws all prompts alike.
        count: number of prompts to draw, at most the sum of `sizes`.
        seed: another seed gives an unrelated draw.

    Source:
        Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006.
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
    """`count` positions of an endless walk, one permutation after the other, from `start` on.

    Permutations `[2, 0, 1]` and `[1, 2, 0]`, start 2, count 3: `[1, 1, 2]`.
    """
    found: list[int] = []
    while len(found) < count:
        epoch, at = divmod(start + len(found), size)
        found += shuffled(size, seed, epoch)[at : at + count - len(found)]
    return found
