"""AdamW on state that RowAdam keeps equals torch's own, and bf16 weights follow an fp32 master."""

from __future__ import annotations

import copy

import torch
from torch import nn

from logra_lightning.optim.adamw import AdamWOptions, adamw_state, adamw_step_

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
