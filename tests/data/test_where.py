"""Errors say where the option was typed."""

from __future__ import annotations

import traceback

import pytest

from logra_lightning.data.where import told_at


def refuse() -> None:
    raise ValueError("columns names 'gold'") from LookupError("cause")


def test_a_value_error_is_told_at_its_place_and_keeps_its_cause_and_origin() -> None:
    with (
        pytest.raises(ValueError, match=r"^data\.sources\[1\]: columns names 'gold'$") as told,
        told_at("data.sources[1]"),
    ):
        refuse()
    assert isinstance(told.value.__cause__, LookupError)
    assert traceback.extract_tb(told.value.__traceback__)[-1].name == "refuse"


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(KeyError, match="^'x'$"), told_at("data.sources[1]"):
        raise KeyError("x")
