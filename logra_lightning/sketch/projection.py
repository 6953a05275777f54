"""Projections `A [r, k]` as a pure function of (seed, draw, name): row 1 of the method.

Nothing is communicated: every rank and every engine computes the same entries. One 64-bit word of
a counter-based integer hash gives 64 signs, so CPU and CUDA agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from logra_lightning.seeding import derive_seed

# Parts that wrappers (torch.compile, FSDP, activation checkpointing) insert into module names.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# splitmix64 (Steele, Lea, Flood 2014) as signed 64-bit integers; torch multiplies modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

Entries = Callable[..., Tensor]


def canonical_name(name: str) -> str:
    """The name of a parameter or module without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def projection_key(seed: int, draw: int, name: str) -> int:
    """Key of one projection, in [0, 2**63).

    Args:
        seed: base seed of the run.
        draw: how often the projections were redrawn before this one.
        name: of the weight's module; wrapper parts are ignored.
    """
    return derive_seed(seed, draw, canonical_name(name))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has signed 64-bit integers only."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _words(key: int, rows: int, words_per_row: int, device: torch.device) -> Tensor:
    """[rows, words_per_row] int64, the hash of each position."""
    position = torch.arange(rows * words_per_row, dtype=torch.int64, device=device)
    x = (position + 1) * _GAMMA + key
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return (x ^ _shift_right(x, 31)).view(rows, words_per_row)


def rademacher(key: int, rank: int, in_features: int, *, device: torch.device) -> Tensor:
    """[rank, in_features] int8 of -1 and +1.

    The projection is `A = entries / sqrt(rank)`; the factor is applied in fp32 by those who use
    it, since it is not exact in bf16. Rows start at a word of the hash, so a slice of columns can
    be made alone.

    Args:
        key: from `projection_key`.
        rank: r, rows of the projection.
        in_features: k, columns of the projection.
        device: where to make it; the bits do not depend on it.
    """
    words = _words(key, rank, math.ceil(in_features / 64), device)
    octets = words.view(torch.uint8)  # little-endian, as every platform of torch
    bit = torch.arange(8, dtype=torch.uint8, device=device)
    bits = ((octets[:, :, None] >> bit) & 1).view(rank, -1)[:, :in_features]
    return bits.to(torch.int8).mul_(2).sub_(1)


def gaussian(key: int, rank: int, in_features: int, *, device: torch.device) -> Tensor:
    """[rank, in_features] fp32 of standard normal values, by Box and Muller's transform.

    Made on the CPU in fp64 whatever `device`, since transcendental functions differ in their last
    bits between devices. Four times the memory of `rademacher`, and slower.

    Args:
        key: from `projection_key`.
        rank: r, rows of the projection.
        in_features: k, columns of the projection.
        device: where the result lies.
    """
    words = _words(key, rank, 2 * in_features, torch.device("cpu"))
    uniform = (_shift_right(words, 11).to(torch.float64) + 0.5) * 2.0**-53
    radius = uniform[:, :in_features].log().mul_(-2.0).sqrt_()
    angle = uniform[:, in_features:] * (2.0 * math.pi)
    return (radius * angle.cos()).to(dtype=torch.float32, device=device)


PROJECTIONS: dict[str, Entries] = {"rademacher": rademacher, "gaussian": gaussian}
