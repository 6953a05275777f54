"""exact_match compares text up to outer white space."""

from __future__ import annotations

import pytest

from logra_lightning.rewards import exact_match


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [("12", "12", 1.0), (" 12\n", "12", 1.0), ("12", 12, 1.0), ("1 2", "12", 0.0), ("", "0", 0.0)],
)
def test_exact_match(completion: str, answer: object, expected: float) -> None:
    assert exact_match(completion, answer) == expected
