"""RowAdam against the rules written out, over several steps, and what must change nothing."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from logra_lightning.optim import AdamWOptions, RelativeRowAdam, RowAdam
from tests.conftest import Pair
from tests.optim.sketches import RANK, projections, random_sketches, setup


def through_bf16(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def close(actual: Tensor, expected: Tensor, before: Tensor) -> None:
    """Updates equal up to bf16 rounding of the direction (2**-9 of each entry) and fp32 of W."""
    error = (actual.to(torch.float64) - expected).norm()
    assert error < 4e-3 * (expected - before).norm() + 1e-6 * before.norm()


def test_lr_rule_equals_the_rule_written_out(pair: Pair) -> None:
    sketches, w = setup(pair)
    lr, b2, eps, decay = 1e-2, 0.9, 1e-6, 0.1
    optimizer = RowAdam(pair.parameters(), sketches, lr=lr, beta2=b2, eps=eps, weight_decay=decay)
    v = {name: torch.zeros(len(x), 1, dtype=torch.float64) for name, x in w.items()}
    for t in range(1, 6):
        s, a = random_sketches(sketches, t), projections(sketches)
        scale = optimizer.propose().scale = 0.5 * t
        optimizer.step()
        for name in w:
            before = w[name]
            v[name] = b2 * v[name] + (1 - b2) * s[name].square().mean(1, keepdim=True)
            d = lr * s[name] / ((v[name] / (1 - b2**t)).sqrt() + eps)
            w[name] = (1 - scale * lr * decay) * before - scale * d @ a[name]
            close(sketches[name].module.weight, w[name], before)
            w[name] = sketches[name].module.weight.detach().to(torch.float64)
        sketches.begin_step(t)


def test_relative_rule_equals_the_rule_written_out(pair: Pair) -> None:
    sketches, w = setup(pair)
    ratio, b2, eps = 1e-3, 0.95, 1e-8
    optimizer = RelativeRowAdam(pair.parameters(), sketches, update_ratio=ratio, beta2=b2, eps=eps)
    v = {name: torch.zeros(len(x), 1, dtype=torch.float64) for name, x in w.items()}
    for t in range(1, 6):
        s, a, d = random_sketches(sketches, t), projections(sketches), {}
        scale = optimizer.propose().scale = 0.5 * t
        for name in w:
            v[name] = b2 * v[name] + (1 - b2) * s[name].square().mean(1, keepdim=True)
            root = (v[name] / (1 - b2**t)).sqrt()
            u = 1 / (root + eps * root.mean())
            u = u / u.square().mean().sqrt()  # RMS 1 over rows
            d[name] = u * s[name]
            d[name] = d[name] * s[name].norm() / d[name].norm()  # layer scale kept
        update = math.sqrt(sum((d[n] @ a[n]).square().sum().item() for n in w))
        factor = ratio * math.sqrt(sum(x.square().sum().item() for x in w.values())) / update
        optimizer.step()
        for name, before in w.items():
            after = before - scale * factor * d[name] @ a[name]
            close(sketches[name].module.weight, after, before)
        w = {name: sketches[name].module.weight.detach().to(torch.float64) for name in w}
        sketches.begin_step(t)


def test_relative_step_is_the_given_fraction_of_the_weights(pair: Pair) -> None:
    sketches, w = setup(pair)
    random_sketches(sketches, 0)
    RelativeRowAdam(pair.parameters(), sketches, update_ratio=1e-3).step()
    moved = sum(
        (sketches[n].module.weight.to(torch.float64) - x).square().sum() for n, x in w.items()
    )
    size = sum(x.square().sum() for x in w.values())
    assert math.sqrt(moved / size) == pytest.approx(1e-3, rel=2e-3)


@pytest.mark.parametrize("rule", [RowAdam, RelativeRowAdam])
def test_merged_is_exactly_what_factors_say(pair: Pair, rule: type[RowAdam]) -> None:
    sketches, w = setup(pair)
    random_sketches(sketches, 0)
    optimizer = rule(pair.parameters(), sketches)
    optimizer.propose().scale = 100.0
    optimizer.step()
    factors = optimizer.take_factors()
    assert factors is not None
    assert optimizer.take_factors() is None
    assert (factors.version, factors.draw, factors.decay) == (0, 0, 1.0)
    assert factors.nbytes == (9 + 7) * RANK * 2
    for name, a in projections(sketches).items():
        assert factors.directions[name].dtype == torch.bfloat16
        expected = w[name] - factors.directions[name].to(torch.float64) @ a
        torch.testing.assert_close(
            sketches[name].module.weight.to(torch.float64), expected, rtol=0, atol=1e-7
        )


@pytest.mark.parametrize("rule", [RowAdam, RelativeRowAdam])
def test_propose_changes_nothing_and_repeats_itself(pair: Pair, rule: type[RowAdam]) -> None:
    sketches, w = setup(pair)
    s = random_sketches(sketches, 0)
    optimizer = rule(pair.parameters(), sketches)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    proposal = optimizer.propose()
    assert optimizer.propose() is proposal
    for name in w:
        assert torch.equal(sketches[name].module.weight.to(torch.float64), w[name])
        c = proposal.row_scales[name]
        torch.testing.assert_close(
            proposal.direction(sketches[name]).to(torch.float64), s[name] * c[:, None]
        )
    torch.testing.assert_close(optimizer.state_dict()["state"], state)


@pytest.mark.parametrize("rule", [RowAdam, RelativeRowAdam])
def test_one_zero_sketch_does_not_move_its_weight(pair: Pair, rule: type[RowAdam]) -> None:
    sketches, w = setup(pair)
    random_sketches(sketches, 0)
    sketches["o_proj"].total.zero_()
    rule(pair.parameters(), sketches).step()
    assert torch.equal(pair.o_proj.weight.to(torch.float64), w["o_proj"])
    assert not torch.equal(pair.q_proj.weight.to(torch.float64), w["q_proj"])


@pytest.mark.parametrize("rule", [RowAdam, RelativeRowAdam])
def test_one_zero_row_does_not_move(pair: Pair, rule: type[RowAdam]) -> None:
    sketches, w = setup(pair)
    random_sketches(sketches, 0)
    sketches["q_proj"].total[2] = 0
    rule(pair.parameters(), sketches).step()
    moved = (pair.q_proj.weight.to(torch.float64) != w["q_proj"]).any(dim=1)
    assert moved.tolist() == [i != 2 for i in range(9)]
    assert pair.q_proj.weight.isfinite().all()


@pytest.mark.parametrize("rule", [RowAdam, RelativeRowAdam])
def test_a_step_without_any_gradient_changes_nothing(pair: Pair, rule: type[RowAdam]) -> None:
    sketches, _ = setup(pair)
    optimizer = rule(pair.parameters(), sketches)
    random_sketches(sketches, 0)
    optimizer.step()
    weights, state = (
        copy.deepcopy(pair.state_dict()),
        copy.deepcopy(optimizer.state_dict()["state"]),
    )
    sketches.begin_step(1)
    optimizer.step()
    factors = optimizer.take_factors()
    assert factors is not None
    assert (factors.version, factors.nbytes) == (1, 0)
    assert optimizer.last_step_scale == 0.0
    torch.testing.assert_close(pair.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sketch_that_is_not_finite_is_named_and_changes_nothing(pair: Pair, value: float) -> None:
    sketches, _ = setup(pair)
    random_sketches(sketches, 0)
    sketches["o_proj"].total[1, 2] = value
    optimizer = RelativeRowAdam(pair.parameters(), sketches)
    weights, state = (
        copy.deepcopy(pair.state_dict()),
        copy.deepcopy(optimizer.state_dict()["state"]),
    )
    with pytest.warns(
        UserWarning, match=r"not finite in 1 of 2 weights, in .* first in 'o_proj'; nothing"
    ):
        optimizer.step()
    factors = optimizer.take_factors()
    assert factors is not None
    assert factors.nbytes == 0
    assert (optimizer.counts.skipped_steps, optimizer.last_step_scale) == (1, 0.0)
    torch.testing.assert_close(pair.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_too_many_skipped_steps_in_a_row_stop_the_run(pair: Pair) -> None:
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches, max_skipped_steps=2)

    def step(value: float) -> None:
        random_sketches(sketches, 0)
        sketches["o_proj"].total[1, 2] = value
        optimizer.step()

    for _ in range(2):  # one good step starts the count again
        for _ in range(2):
            with pytest.warns(UserWarning, match="nothing was updated"):
                step(math.nan)
        step(1.0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="nothing was updated"):
            step(math.nan)
    with pytest.raises(FloatingPointError, match=r"'o_proj'.* in 3 steps in a row \(max_skipped"):
        step(math.nan)
    assert optimizer.counts.skipped_steps == 7
    assert optimizer.proposal is None


def norms_trained(pair: Pair, norms: list[float], **options: object) -> list[bool]:
    """Whether each step changed a weight, with gradients of these norms."""
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches, **options)  # type: ignore[arg-type]
    changed = []
    for step, norm in enumerate(norms):
        sketches.begin_step(step)
        random_sketches(sketches, step)
        sketches.flat.mul_(norm / optimizer.propose().grad_norm)
        optimizer.proposal = None
        before = pair.q_proj.weight.clone()
        optimizer.step()
        factors = optimizer.take_factors()
        assert factors is not None
        assert factors.version == step
        changed.append(not torch.equal(before, pair.q_proj.weight))
        assert changed[-1] == bool(factors.directions) == (optimizer.last_step_scale > 0)
    assert optimizer.counts.updates == sum(changed)
    return changed


@pytest.mark.parametrize(("usual", "clip"), [(1.0, None), (1e-6, 1.0)])
def test_after_one_gradient_of_a_million_times_the_usual_norm_the_run_recovers(
    pair: Pair, usual: float, clip: float | None
) -> None:
    norms = [usual] * 20 + [1e6 * usual] + [usual] * 60
    # By arithmetic: with the mean of the squares so far, corrected for its start, a step is none
    # while its norm is at most 1e-5 of the root.
    square, roots = 0.0, [0.0]
    for step, norm in enumerate(norms, start=1):
        square = 0.95 * square + 0.05 * norm**2
        roots.append(math.sqrt(square / (1 - 0.95**step)))
    expected = [norm > 1e-5 * root for norm, root in zip(norms, roots, strict=False)]
    lost = 81 - sum(expected)
    assert expected == [True] * 21 + [False] * lost + [True] * (60 - lost)
    assert roots[21] == pytest.approx(1e6 * usual * math.sqrt(0.05 / (1 - 0.95**21)))
    at_most, threshold = 0, 1e-5 * roots[25]  # what is told at the fifth of them
    while threshold >= usual:
        at_most, threshold = at_most + 1, threshold * math.sqrt(0.95)
    assert 5 < lost <= 4 + at_most
    with pytest.warns(
        UserWarning, match=rf"in 5 steps in a row, .* at most {at_most} more"
    ) as told:
        assert norms_trained(pair, norms, max_grad_norm=clip) == expected
    assert len(told) == 1


def test_a_gradient_of_exactly_zero_leaves_the_moments_as_they_are(pair: Pair) -> None:
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches)
    random_sketches(sketches, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(10):
        sketches.flat.zero_()
        optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_a_run_resumed_among_tiny_gradients_goes_on_exactly(pair: Pair) -> None:
    sketches, _ = setup(pair)

    def step(optimizer: RelativeRowAdam, number: int) -> None:
        random_sketches(sketches, number)
        sketches.flat.mul_(1.0 if number == 0 else 1e-7)
        optimizer.step()

    straight = RelativeRowAdam(pair.parameters(), sketches)
    for number in range(3):
        step(straight, number)
    resumed = RelativeRowAdam(pair.parameters(), sketches)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert resumed.counts.state_dict() == straight.counts.state_dict()
    assert (resumed.counts.updates, resumed.counts.tiny_in_a_row) == (1, 2)
    for number in (3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step(straight, number)
            step(resumed, number)
    assert straight.state_dict()["counts"] == resumed.state_dict()["counts"]
    torch.testing.assert_close(
        resumed.state_dict()["state"], straight.state_dict()["state"], rtol=0, atol=0
    )


def test_a_checkpoint_of_the_first_release_tells_the_number_of_updates(pair: Pair) -> None:
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches)
    for number in range(2):
        random_sketches(sketches, number)
        optimizer.step()
    old = copy.deepcopy(optimizer.state_dict()) | {"counts": [4, 5, 1]}
    resumed = RelativeRowAdam(pair.parameters(), sketches)
    resumed.load_state_dict(old)
    counts = resumed.counts
    assert (counts.updates, counts.skipped_steps, counts.rejected_steps) == (2, 4, 5)
    assert counts.skipped_in_a_row == 1


def test_tiny_and_huge_sketches_stay_finite(pair: Pair) -> None:
    for size in (1e-18, 1e15):
        sketches, w = setup(pair)
        random_sketches(sketches, 0)
        sketches.flat.mul_(size)
        RelativeRowAdam(pair.parameters(), sketches, update_ratio=1e-3).step()
        moved = [(sketches[n].module.weight - x).norm() / x.norm() for n, x in w.items()]
        assert 1e-4 < max(moved) < 1e-2


def test_clipping_scales_the_gradient_of_all_weights(pair: Pair) -> None:
    sketches, _ = setup(pair)
    s = random_sketches(sketches, 0)
    bias = torch.arange(7.0)
    pair.o_proj.bias.grad = bias.clone()
    norm = math.sqrt(sum(x.square().sum().item() for x in s.values()) + bias.square().sum().item())
    optimizer = RowAdam(pair.parameters(), sketches, max_grad_norm=norm / 4)
    proposal = optimizer.propose()
    assert proposal.grad_norm == pytest.approx(norm)
    for name, x in s.items():
        torch.testing.assert_close(
            proposal.row_moments[name].to(torch.float64),
            0.05 * (x / 4).square().mean(1),
            rtol=1e-5,
            atol=0,
        )


def test_dense_weights_of_the_same_shape_all_count(pair: Pair) -> None:
    sketches, _ = setup(pair)
    twins = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    named = [*pair.named_parameters(), ("one", twins[0]), ("two", twins[1])]
    optimizer = RowAdam(named, sketches)
    twins[0].grad, twins[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0, 0])
    assert optimizer.propose().grad_norm == pytest.approx(5.0)
    optimizer.proposal = None
    twins[0].grad[1] = math.nan
    assert "1 of 4 weights, in the backward pass first in 'one'" in optimizer.propose().problem


def test_dense_weights_are_trained_by_adamw_in_the_same_step(pair: Pair) -> None:
    sketches, _ = setup(pair)
    options = AdamWOptions(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = RowAdam(pair.parameters(), sketches, options)
    reference = nn.Parameter(pair.o_proj.bias.detach().clone())
    adamw = torch.optim.AdamW([reference], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step in range(4):
        random_sketches(sketches, step)
        gradient = torch.randn(7, generator=torch.Generator().manual_seed(step))
        pair.o_proj.bias.grad, reference.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        adamw.step()
        torch.testing.assert_close(pair.o_proj.bias, reference, rtol=1e-6, atol=1e-7)
        sketches.begin_step(step + 1)


def test_bf16_keeps_fp32_masters_of_everything(pair: Pair) -> None:
    """bf16 weights follow an fp32 run: their masters see the same updates."""
    wide, narrow = pair, copy.deepcopy(pair).to(torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())
    optimizers = []
    for model in (wide, narrow):
        sketches, _ = setup(model)
        optimizers.append(RowAdam(model.parameters(), sketches, AdamWOptions(lr=1e-5), lr=1e-5))
    for step in range(50):
        for model, optimizer in zip((wide, narrow), optimizers, strict=True):
            random_sketches(optimizer.sketches, 0)
            model.o_proj.bias.grad = torch.ones_like(model.o_proj.bias)
            optimizer.step()
            optimizer.sketches.begin_step(step + 1)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        torch.testing.assert_close(a.to(torch.bfloat16), b, rtol=2**-7, atol=0)
    state = optimizers[1].state[narrow.o_proj.bias]
    torch.testing.assert_close(state["master"], wide.o_proj.bias.detach())
    assert state["exp_avg"].dtype == torch.float32


def test_closure_runs_between_proposal_and_commit(pair: Pair) -> None:
    sketches, w = setup(pair)
    random_sketches(sketches, 0)
    optimizer = RowAdam(pair.parameters(), sketches)
    seen = []

    def closure() -> str:
        seen.append(optimizer.proposal is not None)
        seen.append(torch.is_grad_enabled())
        seen.append(torch.equal(pair.q_proj.weight.to(torch.float64), w["q_proj"]))
        optimizer.propose().scale = 0.0
        return "loss"

    assert optimizer.step(closure) == "loss"
    assert seen == [True, True, True]
    assert torch.equal(pair.q_proj.weight.to(torch.float64), w["q_proj"])
    assert optimizer.last_step_scale == 0.0
    assert optimizer.propose().scale == 1.0  # the next step's own


def test_a_closure_that_raises_leaves_no_stale_proposal(pair: Pair) -> None:
    sketches, _ = setup(pair)
    random_sketches(sketches, 0)
    optimizer = RowAdam(pair.parameters(), sketches)

    def closure() -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        optimizer.step(closure)
    first = optimizer.propose().grad_norm
    optimizer.proposal = None
    sketches.flat.mul_(2)
    assert optimizer.propose().grad_norm == pytest.approx(2 * first)


def test_schedulers_change_both_groups(pair: Pair) -> None:
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches, AdamWOptions(lr=1.0), update_ratio=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.1])


def test_bad_options_are_refused(pair: Pair) -> None:
    sketches, _ = setup(pair)
    with pytest.raises(ValueError, match="got lr=0"):
        RowAdam(pair.parameters(), sketches, lr=0.0)
    with pytest.raises(ValueError, match="update_ratio must be positive, got -1"):
        RelativeRowAdam(pair.parameters(), sketches, update_ratio=-1.0)
    with pytest.raises(ValueError, match="max_grad_norm must be positive or null"):
        RowAdam(pair.parameters(), sketches, None, -1.0)
    with pytest.raises(ValueError, match="first 'q_proj': pass all parameters"):
        RowAdam(pair.o_proj.parameters(), sketches)
