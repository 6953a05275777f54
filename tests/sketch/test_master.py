"""A bf16 weight and its int16 residual hold every bit of an fp32 master."""

from __future__ import annotations

import torch

from logra_lightning.sketch.master import join, split


def test_split_and_join_are_exact_on_ties_and_random_bits() -> None:
    bits = torch.randint(
        -(2**31), 2**31, (200_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(0)
    ).to(torch.int32)
    ties = (torch.arange(-30000, 30000, dtype=torch.int32) << 16) + 0x8000
    values = torch.cat([bits, ties]).view(torch.float32)
    weight, residual = split(values)
    assert torch.equal(join(weight, residual).view(torch.int32), values.view(torch.int32))
    finite = values[values.isfinite() & (values.abs() < 1e38)]
    error = (split(finite)[0].to(torch.float32) - finite).abs()
    assert (error <= (finite.to(torch.bfloat16).to(torch.float32) - finite).abs()).all()
