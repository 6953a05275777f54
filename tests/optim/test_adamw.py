"""AdamW on state that RowAdam keeps equals torch's own, and bf16 weights follow an fp32 master."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from logra_lightning.optim.adamw import (
    AdamWOptions,
    DenseAdamW,
    adamw_state,
    adamw_step_,
    dense_metrics,
)

OPTIONS = AdamWOptions(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)


def group(*params: nn.Parameter) -> dict[str, object]:
    return {"params": list(params)} | OPTIONS.of_group()


def test_equals_torch_adamw_on_clipped_gradients() -> None:
    param = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    reference = copy.deepcopy(param)
    adamw = torch.optim.AdamW([reference], **OPTIONS.of_group())
    states = {param: adamw_state(param)}
    for step in range(4):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        param.grad, reference.grad = gradient.clone(), gradient * 0.5
        adamw_step_(group(param), states, clip=0.5)
        adamw.step()
    torch.testing.assert_close(param, reference, rtol=0, atol=0)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    param = nn.Parameter(torch.ones(3))
    states = {param: adamw_state(param)}
    adamw_step_(group(param), states, clip=1.0)
    assert param.tolist() == [1, 1, 1]
    assert states[param]["step"].item() == 0


def test_small_updates_of_bf16_weights_add_up() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    states = {param: adamw_state(param)}
    small = {"params": [param]} | (OPTIONS.of_group() | {"lr": 1e-4, "weight_decay": 0.0})
    for _ in range(100):
        param.grad = torch.ones_like(param)
        adamw_step_(small, states, clip=1.0)
    assert abs(states[param]["master"][0].item() - 0.99) < 1e-4
    assert torch.equal(param.detach(), states[param]["master"].to(torch.bfloat16))


# The dense baseline.


def dense(max_grad_norm: float | None = None) -> tuple[DenseAdamW, nn.Parameter, nn.Parameter]:
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    return DenseAdamW([("first", first), ("last", last)], OPTIONS, max_grad_norm), first, last


def test_the_dense_baseline_is_torchs_adamw_on_clipped_gradients() -> None:
    optimizer, first, last = dense(max_grad_norm=1.0)
    copies = copy.deepcopy([first, last])
    reference = torch.optim.AdamW(copies, **OPTIONS.of_group())
    for step in range(3):
        for param, own in zip((first, last), copies, strict=True):
            param.grad = torch.full_like(param, step + 1.0)
            own.grad = param.grad.clone()
        norm = nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        reference.step()
        assert dense_metrics(optimizer) == {
            "optim/grad_norm": norm.item(),
            "optim/skipped_steps": 0.0,
        }
    assert torch.equal(first, copies[0])
    assert torch.equal(last, copies[1])
    assert dense_metrics(reference) == {}


def test_a_dense_gradient_that_is_not_finite_is_skipped_and_counted_through_a_resume() -> None:
    optimizer, first, last = dense(max_grad_norm=1.0)
    optimizer.counts.first_not_finite = lambda: "norm"

    def step(made: DenseAdamW, value: float) -> None:
        for group in made.param_groups:
            for param, grad in zip(group["params"], (math.nan, value), strict=True):
                param.grad = torch.full_like(param, grad)
        made.step()

    for number, bad in enumerate((1.0, math.inf)):
        name = "first" if number == 0 else "last"
        with pytest.warns(
            UserWarning,
            match=rf"step {number}: .* not finite in {number + 1} of 2 weights, .* first in "
            rf"'{name}', because the output of 'norm' is not finite; nothing was updated",
        ):
            step(optimizer, bad)
    assert first.tolist() == [1, 1, 1]
    assert last.tolist() == [1, 1]
    assert not optimizer.state
    resumed, *_ = dense(max_grad_norm=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(UserWarning, match="step 2: "):
        step(resumed, 1.0)
    with pytest.raises(FloatingPointError, match=r"step 3: .* in 4 steps in a row \(max_skipped"):
        step(resumed, 1.0)


def test_dense_gradients_of_zero_move_nothing() -> None:
    optimizer, first, last = dense()
    first.grad, last.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    before = first.detach().clone()
    first.grad, last.grad = torch.zeros(3), torch.zeros(2)
    optimizer.step()
    assert torch.equal(first, before)
    assert optimizer.counts.updates == 1
