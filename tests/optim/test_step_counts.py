"""Counts of steps: which rows are told, which end the run, and what ends a row."""

from __future__ import annotations

import math
import warnings

import pytest

from logra_lightning.optim import Proposal
from logra_lightning.optim.step_counts import StepCounts, steps_until_usual


def proposal(kind: str) -> Proposal:
    norms = {"tiny": 1e-6, "zero": 0.0, "nan": math.nan}
    made = Proposal({}, {}, 0.0, norms.get(kind, 1.0), usual_norm=1.0)
    if kind == "nan":
        made.skip("the gradient is bad")
    elif kind == "kl":
        made.skip("the KL is nan")
    elif kind == "reject":
        made.reject("raise something")
    return made


def count(counts: StepCounts, *kinds: str) -> list[str]:
    """Count steps of these kinds; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, kind in enumerate(kinds):
            counts.count(step, proposal(kind), 0.95)
    return [str(warning.message) for warning in caught]


def test_each_kind_of_step_is_counted_apart_and_saved() -> None:
    counts = StepCounts()
    count(counts, "commit", "nan", "reject", "zero", "tiny", "commit", "reject", "nan")
    assert (counts.updates, counts.skipped_steps, counts.rejected_steps) == (2, 2, 2)
    assert (counts.skipped_in_a_row, counts.rejected_in_a_row) == (1, 1)
    loaded = StepCounts()
    loaded.load_state_dict(counts.state_dict())
    assert loaded == counts


def test_the_third_rejected_update_in_a_row_is_told_once() -> None:
    counts = StepCounts()
    told = count(counts, "reject", "reject", "zero", "tiny", "reject", "reject", "reject")
    assert told == ["step 4: 3 updates in a row were rejected; raise something"]
    assert not count(counts, "commit", "reject", "reject")
    assert len(count(counts, "reject", "reject")) == 1


def test_more_than_twenty_rejected_updates_in_a_row_end_the_run() -> None:
    counts = StepCounts()
    count(counts, *["reject"] * 19, "commit", *["reject"] * 20)
    with pytest.raises(
        RuntimeError, match=r"21 updates in a row .* more than the 20 .*; raise some"
    ):
        count(counts, "reject")


def test_zero_gradients_between_skipped_steps_do_not_hide_the_row() -> None:
    counts = StepCounts(max_skipped_steps=2)
    count(counts, "nan", "zero", "nan", "commit", "nan", "zero", "nan", "zero")
    with pytest.raises(FloatingPointError, match=r"in 3 steps in a row \(max_skipped_steps=2\)"):
        count(counts, "nan")


def test_only_a_gradient_that_is_not_finite_is_looked_for_in_the_forward_pass() -> None:
    counts = StepCounts(first_not_finite=lambda: "layers.3")
    assert count(counts, "nan", "kl") == [
        "step 0: the gradient is bad, because the output of 'layers.3' is not finite; nothing was "
        "updated",
        "step 1: the KL is nan; nothing was updated",
    ]


def test_five_tiny_gradients_in_a_row_are_told_once_per_row() -> None:
    counts = StepCounts()
    (told,) = count(counts, *["tiny"] * 4, "zero", *["tiny"] * 8)
    assert told.startswith("step 5: the norm of the gradient, 1.0e-06, is below 1e-05 of the usual")
    assert "max_grad_norm" in told
    assert not count(counts, "commit", *["tiny"] * 4)
    assert len(count(counts, "tiny")) == 1


@pytest.mark.parametrize(("norm", "usual", "beta2"), [(1.0, 2e5, 0.95), (1e-9, 1.0, 0.5)])
def test_the_steps_to_go_are_those_until_the_threshold_has_fallen(
    norm: float, usual: float, beta2: float
) -> None:
    steps, threshold = 0, 1e-5 * usual
    while norm <= threshold:
        steps, threshold = steps + 1, threshold * math.sqrt(beta2)
    assert steps_until_usual(norm, usual, beta2) == steps
    assert steps_until_usual(norm, usual, 0.0) == 1
