"""What travels: sizes, and the projection rebuilt from the seed alone."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.sketch import Factors, SketchBank, find_targets
from tests.conftest import Pair

CPU = torch.device("cpu")


@pytest.mark.parametrize("projection", ["rademacher", "gaussian"])
def test_entries_are_those_of_the_sketches(pair: Pair, projection: str) -> None:
    modules = find_targets(pair, ["q_proj", "o_proj"])
    sketches = SketchBank(modules, 5, seed=3, projection=projection, device=CPU)
    sketches.begin_step(4)
    directions = {s.name: torch.zeros(s.module.out_features, 5).bfloat16() for s in sketches}
    factors = Factors(4, 3, 4, projection, 1.0, directions)
    assert factors.nbytes == (9 + 7) * 5 * 2
    for layer in sketches:
        entries = factors.entries(layer.name, layer.module.in_features, device=CPU)
        assert torch.equal(entries, layer.entries)
