"""With which rank layers are sketched, and when the sums start again."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.sketch import SketchBank, find_targets
from logra_lightning.sketch.projection import projection_key, rademacher
from tests.conftest import Pair

CPU = torch.device("cpu")


def test_rank_above_in_features_names_the_narrowest_target(pair: Pair) -> None:
    modules = find_targets(pair, ["q_proj", "o_proj"])
    with pytest.raises(ValueError, match=r"between 1 and 9 \(in_features of 'o_proj'\), got 10"):
        SketchBank(modules, 10, device=CPU)


def test_sketches_are_views_of_one_buffer(pair: Pair) -> None:
    sketches = SketchBank(find_targets(pair, ["q_proj", "o_proj"]), 4, device=CPU)
    sketches.flat.fill_(1.0)
    assert sketches.flat.numel() == (9 + 7) * 4
    assert all((s.total == 1).all() for s in sketches)
    sketches.begin_step(0)
    assert (sketches.flat == 0).all()
    assert sketches.nbytes == (9 + 7) * 4 * 4 + (12 + 9) * 4


def test_a_step_begins_once(pair: Pair) -> None:
    sketches = SketchBank(find_targets(pair, ["q_proj"]), 4, device=CPU)
    sketches.begin_step(5)
    sketches.flat.fill_(1.0)
    sketches.begin_step(5)
    assert (sketches.flat == 1).all()
    sketches.begin_step(6)
    assert (sketches.flat == 0).all()


def test_projections_hold_for_refresh_every_steps(pair: Pair) -> None:
    sketches = SketchBank(find_targets(pair, ["q_proj"]), 4, seed=9, device=CPU)
    sketches.refresh_every = 2
    drawn = []
    for step in range(5):
        sketches.begin_step(step)
        drawn.append(sketches["q_proj"].entries)
    expected = [rademacher(projection_key(9, d, "q_proj"), 4, 12, device=CPU) for d in range(3)]
    assert [next(i for i, e in enumerate(expected) if torch.equal(e, x)) for x in drawn] == [
        0,
        0,
        1,
        1,
        2,
    ]
    # Where a resumed run begins does not matter.
    resumed = SketchBank(find_targets(pair, ["q_proj"]), 4, seed=9, device=CPU)
    resumed.refresh_every = 2
    resumed.begin_step(3)
    assert torch.equal(resumed["q_proj"].entries, expected[1])
