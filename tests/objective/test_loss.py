"""The clipped loss against its formula, token by token, and its invariance to how it is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from logra_lightning.objective import ClippedPolicyGradient
from logra_lightning.types import Microbatch


def microbatch(rollout_logprobs: list[float], advantages: list[float]) -> Microbatch:
    mask = torch.ones(1, len(advantages), dtype=torch.bool)
    return Microbatch(
        input_ids=mask.to(torch.int64),
        completion_mask=mask,
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        temperature=1.0,
    )


NEW = [-1.0, -0.5, -2.0, -0.1, -3.0, -1.0]
OLD = [-1.0, -1.2, -1.0, -0.9, -1.0, -1.1]
ADVANTAGES = [0.7, 1.0, 1.0, -1.0, -1.0, 0.0]


def logprobs(values: list[float] = NEW) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def written_out(low: float, high: float, n: int) -> tuple[float, float]:
    total, clipped = 0.0, 0
    for new, old, a in zip(NEW, OLD, ADVANTAGES, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - low), 1 + high)
        total -= min(ratio * a, bounded * a)
        clipped += bounded * a < ratio * a
    return total / n, clipped / n


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1.0, 5.0)])
def test_loss_equals_the_formula_written_out(low: float, high: float) -> None:
    loss, stats = ClippedPolicyGradient(low, high)(logprobs(), microbatch(OLD, ADVANTAGES), 9)
    expected, clip_frac = written_out(low, high, 9)
    assert loss.item() == pytest.approx(expected)
    assert stats["loss/policy"].item() == pytest.approx(expected)
    assert stats["loss/clip_frac"].item() == pytest.approx(clip_frac)
    differences = [abs(new - old) for new, old in zip(NEW, OLD, strict=True)]
    assert stats["mismatch/logprob_diff"].item() == pytest.approx(sum(differences) / 9)
    assert not any(value.requires_grad for value in stats.values())


def test_gradient_is_right_where_it_is_differentiable() -> None:
    batch = microbatch(OLD, ADVANTAGES)
    loss = ClippedPolicyGradient()
    assert torch.autograd.gradcheck(lambda x: loss(x, batch, 6)[0], (logprobs(),))


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    x = logprobs(OLD)
    ClippedPolicyGradient()(x, microbatch(OLD, ADVANTAGES), 6)[0].backward()
    torch.testing.assert_close(x.grad, -torch.tensor(ADVANTAGES, dtype=torch.float64) / 6)


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_shares_of_microbatches_add_up_to_the_whole(cut: int) -> None:
    loss = ClippedPolicyGradient()
    whole, stats = loss(logprobs(), microbatch(OLD, ADVANTAGES), 6)
    parts = [
        loss(logprobs(NEW[i : i + cut]), microbatch(OLD[i : i + cut], ADVANTAGES[i : i + cut]), 6)
        for i in range(0, 6, cut)
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    for name, value in stats.items():
        assert sum(p[name].item() for _, p in parts) == pytest.approx(value.item())


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.5, 0.2), (0.2, 0.0)])
def test_bounds_out_of_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="clip_low must be above 0"):
        ClippedPolicyGradient(low, high)
