"""Projections `A [r, k]`, a pure function of seed, draw and name (row 1 of docs/method.md).

Nothing is sent: every process and every engine computes the same entries for itself. They come
from an integer hash of their position, so CPU and CUDA agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from logra_lightning.seeding import derive_seed

# What torch.compile, FSDP and activation checkpointing insert into the names of modules.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# splitmix64 (Steele, Lea, Flood 2014) as signed 64-bit integers; torch multiplies modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

Entries = Callable[..., Tensor]


def canonical_name(name: str) -> str:
    """The name of a parameter or module without the parts that wrappers insert.

    For example `_orig_mod.layers.0.q_proj` becomes `layers.0.q_proj`.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def projection_key(seed: int, draw: int, name: str) -> int:
    """The key of one projection, an integer in [0, 2**63).

    Args:
        seed: base seed of the projections.
        draw: how many times projections were drawn before.
        name: name of the layer; parts that wrappers insert do not count.
    """
    return derive_seed(seed, draw, canonical_name(name))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch shifts the sign bit in, since its 64-bit integers are signed."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _words(key: int, rows: int, words_per_row: int, device: torch.device) -> Tensor:
    """The hash of each position, [rows, words_per_row] int64."""
    position = torch.arange(rows * words_per_row, dtype=torch.int64, device=device)
    x = (position + 1) * _GAMMA + key
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return (x ^ _shift_right(x, 31)).view(rows, words_per_row)


def rademacher(key: int, rank: int, in_features: int, *, device: torch.device) -> Tensor:
    """Random signs, `A * sqrt(r)`.

    Users of the signs divide by `sqrt(r)` in fp32, since `1 / sqrt(r)` is not exact in bf16. One
    64-bit word of the hash gives 64 signs, and every row begins with a new word: with
    `in_features=130` a row takes three words, and the last gives two signs.

    Args:
        key: the key from `projection_key`.
        rank: r, rows of the projection.
        in_features: k, columns of the projection.
        device: where to make it; the bits do not depend on it.

    Returns:
        [r, k] int8, -1 or +1.
    """
    words = _words(key, rank, math.ceil(in_features / 64), device)
    octets = words.view(torch.uint8)  # little-endian, like every platform that torch runs on
    bit = torch.arange(8, dtype=torch.uint8, device=device)
    bits = ((octets[:, :, None] >> bit) & 1).view(rank, -1)[:, :in_features]
    return bits.to(torch.int8).mul_(2).sub_(1)


def gaussian(key: int, rank: int, in_features: int, *, device: torch.device) -> Tensor:
    """Standard normal values, `A * sqrt(r)`, by the transform of Box and Muller.

    They are always made on the CPU in fp64, since the last bits of logarithm and cosine differ
    between devices. They take four times the memory of `rademacher` and more time.

    Args:
        key: the key from `projection_key`.
        rank: r, rows of the projection.
        in_features: k, columns of the projection.
        device: where the result is put.

    Returns:
        [r, k] fp32.
    """
    words = _words(key, rank, 2 * in_features, torch.device("cpu"))
    uniform = (_shift_right(words, 11).to(torch.float64) + 0.5) * 2.0**-53
    radius = uniform[:, :in_features].log().mul_(-2.0).sqrt_()
    angle = uniform[:, in_features:] * (2.0 * math.pi)
    return (radius * angle.cos()).to(dtype=torch.float32, device=device)


PROJECTIONS: dict[str, Entries] = {"rademacher": rademacher, "gaussian": gaussian}
