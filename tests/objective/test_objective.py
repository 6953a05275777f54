"""The objective against its sum written out, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from logra_lightning.objective import (
    CISPO,
    GSPO,
    K3,
    BatchStats,
    Correction,
    Loss,
    NoCorrection,
    Objective,
    PPOClip,
    ProductMask,
    Reinforce,
    TokenMask,
)
from logra_lightning.objective import TokenTruncation as Truncation
from logra_lightning.types import Microbatch
from tests.objective.batches import microbatch, tensor

NEW = [-1.0, -0.5, -2.0, -0.1]
ROLLOUT = [-1.0, -1.6, -1.9, -0.2]
REFERENCE = [-1.1, -0.4, -1.0, -0.3]
ADVANTAGES = [0.7, 1.0, -1.0, 0.5]
ENTROPIES = [1.0, 0.5, 0.25, 0.1]
WEIGHTS = [0.1, 0.2, 0.3, 0.4]


def run(objective: Objective, chosen: slice = slice(None), old: list[float] | None = None):
    batch = microbatch(
        ADVANTAGES[chosen],
        rollout_logprobs=tensor(ROLLOUT[chosen]),
        reference_logprobs=tensor(REFERENCE[chosen]),
        old_logprobs=None if old is None else tensor(old[chosen]),
        token_weights=tensor(WEIGHTS[chosen]),
        num_completion_tokens=4,
    )
    stats = BatchStats()
    stats.begin_step()
    x = tensor(NEW[chosen], grad=True)
    loss = objective(x, tensor(ENTROPIES[chosen]), batch, stats)
    return loss, x, stats


def test_everything_together_equals_the_sum_written_out() -> None:
    objective = Objective(PPOClip(), Truncation(2.0), K3(0.5), entropy_coefficient=0.1)
    loss, _, stats = run(objective)
    total = policy = kl_mean = 0.0
    for new, ref, a, h, w in zip(NEW, REFERENCE, ADVANTAGES, ENTROPIES, WEIGHTS, strict=True):
        kl = math.exp(ref - new) - 1 + new - ref
        policy += w * -a  # the first step's ratio is 1
        total += w * (-a + 0.5 * kl - 0.1 * h)
        kl_mean += kl / 4
    assert loss.item() == pytest.approx(total)
    values = stats.values()
    assert values["loss/policy"] == pytest.approx(policy)
    assert values["loss/reference_kl"] == pytest.approx(kl_mean)
    assert values["policy/entropy"] == pytest.approx(sum(ENTROPIES) / 4)


def test_mismatch_is_told_whatever_the_correction() -> None:
    for correction in (NoCorrection(), Truncation(2.0)):
        _, _, stats = run(Objective(PPOClip(), correction))
        values = stats.values()
        differences = [new - rollout for new, rollout in zip(NEW, ROLLOUT, strict=True)]
        ratios = [math.exp(d) for d in differences]
        assert values["mismatch/logprob_diff"] == pytest.approx(sum(map(abs, differences)) / 4)
        assert values["mismatch/logprob_diff_max"] == pytest.approx(1.1)
        assert values["mismatch/kl"] == pytest.approx(-sum(differences) / 4)
        assert values["mismatch/is_ratio"] == pytest.approx(sum(ratios) / 4)
        assert values["mismatch/is_ratio_min"] == pytest.approx(min(ratios))
        assert values["mismatch/is_ratio_max"] == pytest.approx(max(ratios))
        capped = ratios if isinstance(correction, Truncation) else [1.0] * 4
        capped = [min(ratio, 2.0) for ratio in capped]
        expected = sum(capped) ** 2 / (4 * sum(c * c for c in capped))
        assert values["mismatch/effective_sample_frac"] == pytest.approx(expected)
        assert values["mismatch/masked_frac"] == 0.0


def test_later_steps_compare_with_the_policy_of_the_batchs_begin() -> None:
    old = [-1.1, -0.6, -2.3, -0.1]
    loss, x, stats = run(Objective(PPOClip(), Truncation(2.0)), old=old)
    expected = 0.0
    for new, before, a, w in zip(NEW, old, ADVANTAGES, WEIGHTS, strict=True):
        ratio = math.exp(new - before)
        surrogate = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        expected -= w * surrogate
    assert loss.item() == pytest.approx(expected)
    # Nothing flows back through the correction, which has the old policy's probabilities.
    (gradient,) = torch.autograd.grad(loss, x)
    slope = WEIGHTS[0] * math.exp(old[0] - ROLLOUT[0]) * math.exp(NEW[0] - old[0])
    assert gradient[0] == pytest.approx(-slope * ADVANTAGES[0])
    assert stats.values()["loss/clip_frac"] == pytest.approx(0.0)


@pytest.mark.parametrize("loss", [PPOClip(), CISPO(), GSPO(0.2, 0.2), Reinforce()])
@pytest.mark.parametrize("correction", [Truncation(2.0), TokenMask(0.9, 2.0), NoCorrection()])
def test_a_correction_scales_what_flows_back_through_each_token(
    loss: Loss, correction: Correction
) -> None:
    """Of a loss of whole completions too, where a masked token must not train its neighbours."""
    plain_value, x, _ = run(Objective(loss, NoCorrection()))
    (plain,) = torch.autograd.grad(plain_value, x)
    value, x, stats = run(Objective(loss, correction))
    (gradient,) = torch.autograd.grad(value, x)
    weights = correction(x.detach() - tensor(ROLLOUT), microbatch(ADVANTAGES))
    torch.testing.assert_close(gradient, plain * weights)
    assert value.item() == pytest.approx(plain_value.item())
    assert stats.values()["mismatch/masked_frac"] == (weights == 0).double().mean().item()


@pytest.mark.parametrize("loss", [PPOClip(), CISPO(), GSPO(), Reinforce()])
def test_tiny_weights_of_a_correction_scale_the_gradient_exactly(loss: Loss) -> None:
    """In fp32, as in training."""
    tiny = torch.tensor([1e-7, 1e-8, 1e-20, 1e-30], dtype=torch.float32)

    class Tiny(NoCorrection):
        def __call__(self, log_ratio: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
            return tiny

    def gradient(correction: Correction) -> torch.Tensor:
        x = torch.tensor(NEW, dtype=torch.float32, requires_grad=True)
        batch = replace(
            microbatch(ADVANTAGES, rollout_logprobs=torch.tensor(ROLLOUT, dtype=torch.float32)),
            advantages=torch.tensor(ADVANTAGES, dtype=torch.float32),
            token_weights=torch.tensor(WEIGHTS, dtype=torch.float32),
        )
        stats = BatchStats()
        stats.begin_step()
        value = Objective(loss, correction)(x, x.detach(), batch, stats)
        return torch.autograd.grad(value, x)[0]

    expected = tiny.double() * gradient(NoCorrection()).double()
    torch.testing.assert_close(gradient(Tiny()).double(), expected, rtol=1e-5, atol=0)


def test_a_masked_token_trains_neither_kl_nor_entropy() -> None:
    def everything(correction: Correction) -> torch.Tensor:
        x, h = tensor(NEW, grad=True), tensor(ENTROPIES, grad=True)
        batch = microbatch(
            ADVANTAGES, rollout_logprobs=tensor(ROLLOUT), reference_logprobs=tensor(REFERENCE)
        )
        stats = BatchStats()
        stats.begin_step()
        Objective(PPOClip(), correction, K3(0.5), 0.1)(x, h, batch, stats).backward()
        assert x.grad is not None
        assert h.grad is not None
        return torch.stack([x.grad, h.grad])

    ratios = [math.exp(new - rollout) for new, rollout in zip(NEW, ROLLOUT, strict=True)]
    masked = torch.tensor([not 0.9 <= ratio <= 2.0 for ratio in ratios])
    assert masked.tolist() == [False, True, False, False]
    gradient = everything(TokenMask(0.9, 2.0))
    assert (gradient[:, masked] == 0).all()
    assert (gradient[:, ~masked] != 0).all()


@pytest.mark.parametrize("correction", [Truncation(2.0), ProductMask(), NoCorrection()])
@pytest.mark.parametrize("loss", [PPOClip(), CISPO(), GSPO(), Reinforce()])
def test_an_empty_microbatch_has_loss_zero_with_a_graph_and_leaves_no_trace(
    loss: Loss, correction: Correction
) -> None:
    objective = Objective(loss, correction, K3(0.5), entropy_coefficient=0.1)
    value, x, stats = run(objective, slice(0, 0))
    assert value.item() == 0.0
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient.shape == (0,)
    assert stats.values() == {}


def test_empty_microbatches_change_no_statistics() -> None:
    objective = Objective(PPOClip(), Truncation(2.0))
    _, _, alone = run(objective)
    _, _, stats = run(objective)
    empty = microbatch([], num_completion_tokens=4)
    for _ in range(2):  # after the others of a step, and as a step with nothing else
        objective(tensor([], grad=True), tensor([]), empty, stats)
        stats.begin_step()
    assert stats.values() == alone.values()


@pytest.mark.parametrize("size", [1, 2])
def test_shares_of_microbatches_add_up_to_the_whole(size: int) -> None:
    objective = Objective(PPOClip(), Truncation(2.0), K3(0.5), entropy_coefficient=0.1)
    whole, _, stats = run(objective)
    parts = [run(objective, slice(i, i + size)) for i in range(0, 4, size)]
    assert sum(loss.item() for loss, _, _ in parts) == pytest.approx(whole.item())
    together = {
        name: sum(part.values()[name] for _, _, part in parts)
        for name in ("loss/policy", "loss/clip_frac", "policy/entropy", "mismatch/kl")
    }
    for name, value in together.items():
        assert value == pytest.approx(stats.values()[name], abs=1e-7)
