"""The schedule, the mismatch that is subtracted from it, and the step scale that keeps to it."""

from __future__ import annotations

import math

import pytest

from logra_lightning.kl.budget import (
    MismatchAverage,
    Schedule,
    predicted_scale,
    shrink_until_within,
)


def test_both_ends_of_the_schedule_are_reached() -> None:
    for shape in ("cosine", "linear"):
        schedule = Schedule(2e-4, 2e-5, 300, shape)  # type: ignore[arg-type]
        assert schedule(0) == pytest.approx(2e-4, rel=1e-12)
        assert schedule(299) == pytest.approx(2e-5, rel=1e-12)
        assert schedule(5000) == schedule(299)
        values = [schedule(n) for n in range(300)]
        assert values == sorted(values, reverse=True)
    assert Schedule(2e-4, 2e-5, 301, "cosine")(150) == pytest.approx(1.1e-4)
    assert Schedule(2e-4, 2e-5, 301, "linear")(75) == pytest.approx(2e-4 - 1.8e-4 / 4)
    assert Schedule(2e-4, 2e-5, 300, "constant")(299) == 2e-4
    assert Schedule(2e-4, 2e-5, 1, "cosine")(0) == 2e-5


def test_the_mismatch_is_subtracted_down_to_half() -> None:
    average = MismatchAverage(0.5)
    assert average.subtracted_from(1e-4, None) == 1e-4
    assert average.subtracted_from(1e-4, 2e-5) == pytest.approx(8e-5)
    assert average.value is None
    average.add(2e-5)
    assert average.subtracted_from(1e-4, 4e-5) == pytest.approx(1e-4 - 3e-5)
    average.add(4e-5)
    assert average.value == pytest.approx(3e-5)
    assert average.subtracted_from(1e-4, -1.0) == pytest.approx(1e-4 - 1.5e-5)  # not below zero
    assert average.subtracted_from(1e-4, 1.0) == pytest.approx(5e-5)
    assert average.subtracted_from(1e-4, None) == pytest.approx(7e-5)
    assert average.subtracted_from(1e-4, math.nan) == pytest.approx(7e-5)


def test_the_predicted_scale_spends_the_budget_up_to_the_largest_scale() -> None:
    assert predicted_scale(4e-4, 1e-4, 3.0) == pytest.approx(0.5)
    assert predicted_scale(1e-9, 1e-4, 3.0) == 3.0
    assert predicted_scale(0.0, 1e-4, 3.0) == 1.0


@pytest.mark.parametrize(
    ("per_square", "tried"),
    [
        (1.9, [1.0]),  # within the tolerance at once
        (3.0, [1.0, 0.5]),  # at least halved
        (16.0, [1.0, 0.25]),  # to where a quadratic KL is the budget
        (math.inf, [1.0, 0.5, 0.25]),  # and never within
        (math.nan, [1.0, 0.5, 0.25]),
    ],
)
def test_a_scale_is_shrunk_until_its_kl_is_within_the_tolerance(
    per_square: float, tried: list[float]
) -> None:
    seen = []

    def measure(scale: float) -> float:
        seen.append(scale)
        return per_square * scale * scale

    scale, measured, backtracks = shrink_until_within(
        measure, 1.0, 1.0, tolerance=2.0, max_backtracks=2
    )
    assert seen == tried
    assert (scale, backtracks) == (tried[-1], len(tried) - 1)
    assert measured <= 2.0 or not math.isfinite(measured)
