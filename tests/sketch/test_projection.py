"""Projections are pure functions of (seed, draw, name), on every device."""

from __future__ import annotations

import hashlib

import pytest
import torch

from logra_lightning.sketch.projection import (
    canonical_name,
    gaussian,
    projection_key,
    rademacher,
)

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The published reference (Vigna's splitmix64.c), in plain Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_signs(key: int, rank: int, in_features: int) -> list[list[int]]:
    per_row = -(-in_features // 64)
    rows = []
    for i in range(rank):
        row = []
        for j in range(in_features):
            position = i * per_row + j // 64
            word = splitmix64((key + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
            row.append(1 if (word >> (j % 64)) & 1 else -1)
        rows.append(row)
    return rows


def test_splitmix64_reference_gives_the_published_first_output() -> None:
    # First output of splitmix64 seeded with 0, as printed in its test vectors.
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize(("rank", "in_features"), [(1, 1), (3, 64), (5, 130), (7, 63)])
def test_signs_equal_the_plain_integer_form(rank: int, in_features: int) -> None:
    key = projection_key(7, 3, "model.layers.0.self_attn.q_proj")
    assert rademacher(key, rank, in_features, device=CPU).tolist() == plain_signs(
        key, rank, in_features
    )


def test_golden_signs() -> None:
    # Changing these changes every run and every engine: never update them lightly.
    key = projection_key(0, 0, "q_proj")
    text = hashlib.blake2b(b"0/0/q_proj", digest_size=8).digest()
    assert key == int.from_bytes(text, "little") >> 1
    signs = rademacher(key, 2, 16, device=CPU)
    assert ["".join("+" if s > 0 else "-" for s in row) for row in signs.tolist()] == GOLDEN


GOLDEN = ["--+---+----++++-", "---+---+++-+-+-+"]


def test_a_slice_of_columns_can_be_made_from_its_words() -> None:
    key = projection_key(0, 0, "x")
    whole = rademacher(key, 4, 256, device=CPU)
    assert rademacher(key, 1, 64, device=CPU)[0].tolist() == whole[0, :64].tolist()


def test_wrapper_parts_do_not_change_the_projection() -> None:
    wrapped = "_orig_mod.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.q_proj"
    assert canonical_name(wrapped) == "layers.0.q_proj"
    assert projection_key(1, 2, wrapped) == projection_key(1, 2, "layers.0.q_proj")


@pytest.mark.parametrize("change", [(1, 0, "q"), (0, 1, "q"), (0, 0, "k")])
def test_seed_draw_and_name_each_change_the_projection(change: tuple[int, int, str]) -> None:
    first = rademacher(projection_key(0, 0, "q"), 64, 640, device=CPU).to(torch.float32)
    other = rademacher(projection_key(*change), 64, 640, device=CPU).to(torch.float32)
    # 40,960 fair coins agree in half of the places, to five standard deviations (0.0025 each).
    assert abs((first == other).to(torch.float32).mean().item() - 0.5) < 5 * 0.0025


def test_expectation_of_gram_is_the_identity() -> None:
    mean = torch.zeros(24, 24, dtype=torch.float64)
    for draw in range(400):
        a = rademacher(projection_key(0, draw, "x"), 16, 24, device=CPU).to(torch.float64) / 4
        mean += a.t() @ a / 400
    # Off the diagonal each entry is a mean of 400 * 16 signs / 16: deviation 1 / sqrt(6,400).
    assert (mean - torch.eye(24, dtype=torch.float64)).abs().max() < 5 / 80


def test_gaussian_has_the_moments_of_a_standard_normal() -> None:
    x = gaussian(projection_key(0, 0, "x"), 200, 1000, device=CPU).to(torch.float64)
    assert abs(x.mean()) < 5 / 200_000**0.5
    assert abs(x.var() - 1) < 5 * (2 / 200_000) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / 200_000) ** 0.5
    assert torch.equal(
        x, gaussian(projection_key(0, 0, "x"), 200, 1000, device=CPU).to(torch.float64)
    )
