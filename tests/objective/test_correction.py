"""Corrections of the engine's mismatch against their formulas, written out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from logra_lightning.objective import (
    GeometricMeanMask,
    NoCorrection,
    ProductMask,
    TokenMask,
    TokenTruncation,
)
from tests.objective.batches import microbatch, tensor

RATIOS = [1.0, 2.5, 0.4, 1.1, 1.3, 0.9, 1.05]
LENGTHS = [3, 4]
PRODUCTS = [1.0 * 2.5 * 0.4, 1.1 * 1.3 * 0.9 * 1.05]


def weights(correction: Any) -> list[float]:
    log_ratio = tensor([math.log(ratio) for ratio in RATIOS])
    return correction(log_ratio, microbatch([1.0] * 7, LENGTHS)).tolist()


def test_token_truncation_caps_each_ratio() -> None:
    assert weights(TokenTruncation(2.0)) == pytest.approx([1.0, 2.0, 0.4, 1.1, 1.3, 0.9, 1.05])


def test_token_mask_drops_ratios_outside_the_band_and_keeps_the_others() -> None:
    expected = [1.0, 0.0, 0.0, 1.1, 1.3, 0.9, 1.05]
    assert weights(TokenMask(0.5, 2.0)) == pytest.approx(expected)


def test_product_mask_weighs_a_completion_by_its_product_up_to_the_cap() -> None:
    assert PRODUCTS[1] == pytest.approx(1.35135)
    assert weights(ProductMask(3.0)) == pytest.approx([1.0] * 3 + [1.35135] * 4)
    assert weights(ProductMask(1.2)) == pytest.approx([1.0] * 3 + [0.0] * 4)


def test_geometric_mean_mask_keeps_or_drops_whole_completions() -> None:
    means = [PRODUCTS[0] ** (1 / 3), PRODUCTS[1] ** (1 / 4)]
    assert means == pytest.approx([1.0, 1.0782], abs=1e-4)
    assert weights(GeometricMeanMask(0.99, 1.01)) == [1.0] * 3 + [0.0] * 4
    assert weights(GeometricMeanMask(0.9, 1.1)) == [1.0] * 7


def test_no_correction_is_one() -> None:
    assert weights(NoCorrection()) == [1.0] * 7


def test_ratios_that_overflow_are_masked_or_capped_without_nan() -> None:
    log_ratio = tensor([0.0, 800.0, -800.0])
    batch = microbatch([1.0] * 3)
    assert TokenTruncation(2.0)(log_ratio, batch).tolist() == [1.0, 2.0, 0.0]
    assert TokenMask()(log_ratio, batch).tolist() == [1.0, 0.0, 0.0]
    assert ProductMask()(tensor([0.0, 800.0, 800.0]), batch).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (TokenTruncation, {"cap": 0.5}, "cap must be at least 1"),
        (ProductMask, {"cap": float("nan")}, "cap must be at least 1"),
        (TokenMask, {"low": 1.5}, "must enclose 1"),
        (TokenMask, {"low": 0.0}, "low above 0"),
        (GeometricMeanMask, {"high": 0.9}, "must enclose 1"),
    ],
)
def test_bounds_out_of_range_are_refused(make: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
