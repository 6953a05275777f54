"""Every loss against its formula, token by token in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from logra_lightning.objective import CISPO, GSPO, Loss, PPOClip, Reinforce
from tests.objective.batches import microbatch, tensor

NEW = [-1.0, -0.5, -2.0, -0.1, -3.0, -1.0, -0.2]
OLD = [-1.0, -1.2, -1.0, -0.9, -1.0, -1.1, -2.5]
ADVANTAGES = [0.7, 1.0, 1.0, -1.0, -1.0, 0.0, -0.5]
LENGTHS = [3, 4]


def per_token(loss: Loss, new: list[float] = NEW) -> tuple[Any, Any, Any]:
    x = tensor(new, grad=True)
    values, stats = loss(x, x - tensor(OLD), microbatch(ADVANTAGES, LENGTHS))
    (gradient,) = torch.autograd.grad(values.sum(), x)
    return values.tolist(), gradient.tolist(), stats


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1.0, 5.0)])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_clip_equals_the_formula_written_out(
    low: float, high: float, dual: float | None
) -> None:
    values, gradient, stats = per_token(PPOClip(low, high, dual))
    for i, (new, old, a) in enumerate(zip(NEW, OLD, ADVANTAGES, strict=True)):
        ratio = math.exp(new - old)
        surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        expected, slope = -surrogate, -ratio * a if surrogate == ratio * a else 0.0
        if dual is not None and a < 0 and expected > -dual * a:
            expected, slope = -dual * a, 0.0
        assert values[i] == pytest.approx(expected)
        assert gradient[i] == pytest.approx(slope)
        assert stats["loss/clip_frac"][i] == (expected != pytest.approx(-ratio * a))


def test_dual_clip_bounds_the_loss_of_a_token_that_became_likely() -> None:
    unbounded, _, _ = per_token(PPOClip())
    bounded, _, _ = per_token(PPOClip(dual_clip=3.0))
    assert unbounded[6] == pytest.approx(0.5 * math.exp(2.3))
    assert bounded[6] == pytest.approx(1.5)


@pytest.mark.parametrize(("high", "low"), [(0.28, None), (4.0, None), (0.1, 0.1)])
def test_cispo_equals_the_formula_and_leaves_no_token_without_gradient(
    high: float, low: float | None
) -> None:
    values, gradient, stats = per_token(CISPO(high, low))
    for i, (new, old, a) in enumerate(zip(NEW, OLD, ADVANTAGES, strict=True)):
        ratio = math.exp(new - old)
        weight = max(min(ratio, 1 + high), 0.0 if low is None else 1 - low)
        assert values[i] == pytest.approx(-weight * a * new)
        assert gradient[i] == pytest.approx(-weight * a)
        assert stats["loss/clip_frac"][i] == (weight != ratio)


def test_gspo_equals_the_formula_with_one_ratio_for_each_completion() -> None:
    low, high = 0.1, 0.3
    values, gradient, _ = per_token(GSPO(low, high))
    start = 0
    for length in LENGTHS:
        tokens = range(start, start + length)
        ratio = math.exp(sum(NEW[i] - OLD[i] for i in tokens) / length)
        slopes = 0.0
        for i in tokens:
            clipped = min(max(ratio, 1 - low), 1 + high)
            surrogate = min(ratio * ADVANTAGES[i], clipped * ADVANTAGES[i])
            assert values[i] == pytest.approx(-surrogate)
            if surrogate == ratio * ADVANTAGES[i]:
                slopes -= ratio * ADVANTAGES[i] / length
        assert [gradient[i] for i in tokens] == pytest.approx([slopes] * length)
        start += length


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    values, gradient, stats = per_token(Reinforce())
    assert values == pytest.approx([-a * x for a, x in zip(ADVANTAGES, NEW, strict=True)])
    assert gradient == pytest.approx([-a for a in ADVANTAGES])
    assert stats == {}


@pytest.mark.parametrize("loss", [PPOClip(), CISPO(), GSPO(), Reinforce()])
def test_first_step_of_a_batch_has_the_plain_policy_gradient(loss: Loss) -> None:
    # One advantage per completion, as they come: GSPO spreads a completion's over its tokens.
    advantages = [0.7] * 3 + [-0.4] * 4
    x = tensor(OLD, grad=True)
    values, _ = loss(x, x - tensor(OLD), microbatch(advantages, LENGTHS))
    (gradient,) = torch.autograd.grad(values.sum(), x)
    torch.testing.assert_close(gradient, -tensor(advantages))


@pytest.mark.parametrize("loss", [PPOClip(), PPOClip(dual_clip=3.0), GSPO(0.1, 0.3), Reinforce()])
def test_gradients_are_those_of_the_values(loss: Loss) -> None:
    batch = microbatch(ADVANTAGES, LENGTHS)
    assert torch.autograd.gradcheck(
        lambda x: loss(x, x - tensor(OLD), batch)[0].sum(), (tensor(NEW, grad=True),)
    )


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (PPOClip, {"clip_low": 0.0}, "clip_low must be above 0"),
        (PPOClip, {"clip_low": 1.5}, "clip_low must be above 0"),
        (PPOClip, {"clip_high": 0.0}, "clip_high above 0"),
        (PPOClip, {"dual_clip": 1.0}, "dual_clip must be above 1"),
        (CISPO, {"clip_high": 0.0}, "clip_high must be above 0"),
        (CISPO, {"clip_low": 2.0}, "at most 1, or null"),
        (GSPO, {"clip_low": 0.0}, "clip_low must be above 0"),
    ],
)
def test_bounds_out_of_range_are_refused(make: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
