"""Sketches of a small model, filled with random sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logra_lightning.sketch import SketchBank, find_targets
from tests.conftest import Pair

CPU = torch.device("cpu")
RANK = 6


def setup(pair: Pair, **options: object) -> tuple[SketchBank, dict[str, Tensor]]:
    for name in ("q_proj", "o_proj"):
        getattr(pair, name).weight.requires_grad_(False)
    sketches = SketchBank(find_targets(pair, ["q_proj", "o_proj"]), RANK, device=CPU)
    sketches.begin_step(0)
    return sketches, {s.name: s.module.weight.detach().to(torch.float64).clone() for s in sketches}


def random_sketches(sketches: SketchBank, step: int) -> dict[str, Tensor]:
    """Fill the sums with rows of very different size; return S."""
    generator = torch.Generator().manual_seed(step)
    for layer in sketches:
        rows = torch.logspace(-4, 1, len(layer.total))[:, None]
        layer.total.copy_(torch.randn(layer.total.shape, generator=generator) * rows)
    return {s.name: s.total.to(torch.float64) / math.sqrt(RANK) for s in sketches}


def projections(sketches: SketchBank) -> dict[str, Tensor]:
    return {s.name: s.entries.to(torch.float64) / math.sqrt(RANK) for s in sketches}
