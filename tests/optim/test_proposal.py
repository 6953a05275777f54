"""What callbacks may decide about a pending step, and when there is nothing to decide."""

from __future__ import annotations

import copy

import pytest
import torch

from logra_lightning.optim import Proposal, RelativeRowAdam
from tests.conftest import Pair
from tests.optim.sketches import random_sketches, setup


@pytest.mark.parametrize("how", ["skip", "reject"])
def test_a_pending_step_can_be_taken_back(pair: Pair, how: str) -> None:
    sketches, _ = setup(pair)
    pair.o_proj.bias.grad = torch.ones(7)
    optimizer = RelativeRowAdam(pair.parameters(), sketches)
    random_sketches(sketches, 0)
    weights, state = (
        copy.deepcopy(pair.state_dict()),
        copy.deepcopy(optimizer.state_dict()["state"]),
    )

    def closure() -> None:
        if how == "skip":
            optimizer.propose().skip("the logits are not finite")
        else:
            optimizer.propose().reject()

    if how == "skip":
        with pytest.warns(UserWarning, match="step 0: the logits are not finite; nothing was"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
    torch.testing.assert_close(pair.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    factors = optimizer.take_factors()
    assert factors is not None
    assert not factors.directions
    counts = optimizer.counts
    assert (counts.skipped_steps, counts.rejected_steps) == ((1, 0) if how == "skip" else (0, 1))
    assert counts.updates == 0
    optimizer.step()  # the next one is made
    assert optimizer.last_step_scale == 1.0
    assert not torch.equal(pair.o_proj.bias, weights["o_proj.bias"])


def test_the_first_state_that_holds_decides() -> None:
    proposal = Proposal({}, {}, 0.0, grad_norm=1.0)
    assert (proposal.is_committed, proposal.scale) == (True, 1.0)
    proposal.reject()
    assert not proposal.is_committed
    proposal = Proposal({}, {}, 0.0, grad_norm=1.0)
    proposal.skip("first")
    proposal.skip("second")
    assert (proposal.problem, proposal.is_committed) == ("first", False)


def test_what_rounding_leaves_of_a_gradient_is_zero() -> None:
    assert Proposal({}, {}, 0.0, grad_norm=1e-6, usual_norm=1.0).is_zero
    assert not Proposal({}, {}, 0.0, grad_norm=1e-4, usual_norm=1.0).is_zero
    assert not Proposal({}, {}, 0.0, grad_norm=1e-9).is_zero  # the first step knows no usual one
    assert Proposal({}, {}, 0.0, grad_norm=0.0).is_zero


def test_a_gradient_of_rounding_alone_decays_moments_unless_it_is_exactly_zero() -> None:
    def proposal(grad_norm: float) -> Proposal:
        return Proposal({}, {}, 0.0, grad_norm=grad_norm, usual_norm=1.0)

    assert proposal(1e-6).decays_moments
    assert not proposal(0.0).decays_moments
    assert not proposal(1e-4).decays_moments
    rejected, skipped = proposal(1e-6), proposal(1e-6)
    rejected.reject()
    skipped.skip("not finite")
    assert not rejected.decays_moments
    assert not skipped.decays_moments
