"""An injected update is the merged one, and its tangent the derivative by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from logra_lightning.kl.inject import (
    Change,
    injected_tangents,
    injected_update,
)
from logra_lightning.sketch import SketchBank, find_targets, merge_
from tests.conftest import Pair
from tests.kl.probes import change

CPU = torch.device("cpu")


def changes_of(model: nn.Module, size: float, rate: float = 0.0) -> list[Change]:
    targets = ["q_proj", "o_proj"] if not isinstance(model, LlamaForCausalLM) else None
    sketches = SketchBank(find_targets(model, *([targets] if targets else [])), 4, device=CPU)
    sketches.begin_step(3)
    generator = torch.Generator().manual_seed(0)
    return [
        change(s, torch.randn(s.module.out_features, 4, generator=generator) * size, rate)
        for s in sketches
    ]


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_injected_is_merged(llama: LlamaForCausalLM, rate: float) -> None:
    tokens = torch.arange(12).view(1, 12)
    changes = [
        change(c.layer, c.direction().to(torch.bfloat16), rate) for c in changes_of(llama, 0.1)
    ]
    with torch.no_grad():
        before = llama(tokens).logits
        with injected_update(changes):
            injected = llama(tokens).logits
        torch.testing.assert_close(llama(tokens).logits, before, rtol=0, atol=0)  # hooks are gone
        for c in changes:
            merge_(c.layer.module.weight, c.direction(), c.layer.entries, decay=1 - rate)
        after = llama(tokens).logits
    torch.testing.assert_close(injected, after, rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 0.1


def test_tangent_is_the_derivative_by_autograd(pair: Pair) -> None:
    """Against the Jacobian of all weights, written out."""
    pair = pair.double()
    x = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    changes = changes_of(pair, 0.3, rate=0.1)

    def outputs(*weights: Tensor) -> Tensor:
        names = ["q_proj.weight", "o_proj.weight"]
        state = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(pair, state, x)

    weights = [c.layer.module.weight.detach() for c in changes]
    jacobians = torch.autograd.functional.jacobian(outputs, tuple(weights))
    expected = torch.zeros(3, 7, dtype=torch.float64)
    for c, weight, jacobian in zip(changes, weights, jacobians, strict=True):
        a = c.layer.projection.to(torch.float64)
        step = -(c.rate * weight + c.direction().to(torch.float64) @ a)
        expected += (jacobian * step).sum(dim=(-2, -1))
    with torch.no_grad(), injected_tangents(changes):
        tangent = fwAD.unpack_dual(pair(x)).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at", [0.5, 1.0])
def test_a_tangent_along_the_way_is_that_of_the_weights_there(pair: Pair, at: float) -> None:
    """Against the derivative at 0 of a model into which that part of the update is merged."""
    pair = pair.double()
    x = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    changes = changes_of(pair, 0.3, rate=0.1)
    with torch.no_grad(), injected_tangents(changes, at):
        found = fwAD.unpack_dual(pair(x))
    steps = []
    for c in changes:
        a = c.layer.projection.to(torch.float64)
        weight = c.layer.module.weight
        steps.append(-(c.rate * weight.detach() + c.direction().to(torch.float64) @ a))
        weight.data += at * steps[-1]

    def outputs(*weights: Tensor) -> Tensor:
        names = ["q_proj.weight", "o_proj.weight"]
        return torch.func.functional_call(pair, dict(zip(names, weights, strict=True)), x)

    there = tuple(c.layer.module.weight.detach() for c in changes)
    expected, derivative = torch.func.jvp(outputs, there, tuple(steps))
    torch.testing.assert_close(found.primal, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.tangent, derivative, rtol=1e-6, atol=1e-6)


def test_hooks_are_gone_after_an_error(pair: Pair) -> None:
    changes = changes_of(pair, 0.1)
    for injected in (injected_update, injected_tangents):

        def fail(injected: object = injected) -> None:
            with injected(changes):  # type: ignore[operator]
                raise KeyError

        with pytest.raises(KeyError):
            fail()
    assert not any(module._forward_hooks for module in pair.modules())
