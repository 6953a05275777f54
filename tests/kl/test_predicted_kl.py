"""Predicted KL against the KL of ever smaller steps, dense Jacobians and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from logra_lightning.kl import KLProbe
from logra_lightning.kl.measured_kl import measured_kl, tangent_kl
from logra_lightning.kl.predicted_kl import (
    difference_step,
    finite_differences,
    half_variance,
    predicted_kl,
    tangents,
)
from logra_lightning.sketch import SketchBank, find_targets
from tests.kl.probes import FAMILIES, change, make_changes, make_model, make_probe, mean, scaled
from tests.peak import peak_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("config", FAMILIES)
def test_prediction_becomes_the_kl_as_the_step_shrinks(config: str) -> None:
    model = make_model(config).double()
    probe, changes = make_probe(model, 0.7), make_changes(model, rate=0.02)
    pairs = tangents(probe, changes)
    assert model.config._attn_implementation == "sdpa"
    q = mean(predicted_kl(probe, pairs))
    errors = []
    for a in (1e-1, 1e-2, 1e-3):
        new = probe.hidden(scaled(changes, a))
        kl = mean(measured_kl(probe, [hidden for hidden, _ in pairs], new))
        errors.append(abs(kl / (a * a * q) - 1))
    assert errors[0] > errors[1]
    assert errors[-1] < 1e-3


@pytest.mark.parametrize("config", FAMILIES)
def test_finite_differences_give_the_same_within_a_hundredth(config: str) -> None:
    model = make_model(config)
    probe, changes = make_probe(model), make_changes(model, size=1e-4)
    exact = mean(predicted_kl(probe, tangents(probe, changes)))
    pairs = finite_differences(probe, changes, step=difference_step(changes))
    assert mean(predicted_kl(probe, pairs)) == pytest.approx(exact, rel=1e-2)


def test_prediction_is_the_textbook_formula_on_a_dense_jacobian() -> None:
    """Twenty parameters: the whole Jacobian of the logits, and the Fisher matrix of softmax."""
    layer = nn.Linear(4, 5, bias=False).double()
    layers = nn.ModuleDict({"up_proj": layer})
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    temperature = 0.6
    sketches = SketchBank(find_targets(layers, ["up_proj"]), 3, device=CPU)
    sketches.begin_step(0)
    direction = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    changes = [change(sketches["up_proj"], direction, 0.1)]
    probe = KLProbe(layers, [lambda: layer(x)], lambda hidden: hidden / temperature)
    q = predicted_kl(probe, tangents(probe, changes), chunk_tokens=4)

    weight = layer.weight.detach()
    jacobian = torch.autograd.functional.jacobian(lambda w: x @ w.t() / temperature, weight)
    step = -(0.1 * weight + direction.double() @ sketches["up_proj"].projection.double())
    total = 0.0
    for row in range(6):
        dz = (jacobian[row] * step).sum(dim=(-2, -1))
        p = torch.softmax(x[row] @ weight.t() / temperature, dim=-1)
        fisher = torch.diag(p) - torch.outer(p, p)
        total += (dz @ fisher @ dz).item() / 2
    assert q[0].item() == pytest.approx(total, rel=1e-6)
    assert q[1].item() == 6


def test_half_variance_is_the_variance_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    z, dz = (torch.randn(4, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    p = torch.softmax(z, dim=-1)
    variance = (p * dz**2).sum(-1) - (p * dz).sum(-1) ** 2
    torch.testing.assert_close(half_variance(z, dz), variance / 2)


def test_chunks_do_not_change_the_sum() -> None:
    model = make_model()
    probe = make_probe(model)
    pairs = tangents(probe, make_changes(model))
    for chunk in (1, 7):
        torch.testing.assert_close(
            predicted_kl(probe, pairs, chunk_tokens=chunk), predicted_kl(probe, pairs)
        )


def test_the_temperature_divides_both_sides() -> None:
    """At temperature T the prediction is that of a head whose weights are divided by T."""
    model = make_model()
    changes = make_changes(model)
    at_half = make_probe(model, 0.5)
    q = mean(predicted_kl(at_half, tangents(at_half, changes)))
    model.lm_head.weight.data.mul_(2)
    at_one = make_probe(model, 1.0)
    assert mean(predicted_kl(at_one, tangents(at_one, changes))) == pytest.approx(q, rel=1e-6)


class NoForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoForward.apply(x)


def test_an_operation_without_forward_derivative_is_named() -> None:
    layers = nn.Sequential()
    layers.add_module("up_proj", nn.Linear(4, 4, bias=False))
    layers.add_module("doubled", Doubled())
    sketches = SketchBank(find_targets(layers, ["up_proj"]), 2, device=CPU)
    sketches.begin_step(0)
    changes = [change(sketches["up_proj"], torch.ones(4, 2), 0.0)]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    probe = KLProbe(layers, [lambda: layers(x)], lambda hidden: hidden)
    with pytest.raises(NotImplementedError, match=r"in 'doubled' has no .*finite_difference"):
        tangents(probe, changes)
    pairs = finite_differences(probe, changes, step=difference_step(changes))
    expected = -2 * (x @ sketches["up_proj"].projection.t() @ torch.ones(2, 4))
    torch.testing.assert_close(pairs[0][1], expected, rtol=1e-2, atol=1e-2)


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    """8,192 tokens, a vocabulary of 151,936: five gigabytes in fp32."""
    vocabulary, tokens = 151_936, 8192
    one = torch.ones(1)
    sizes = []

    def logits(h: Tensor) -> Tensor:
        sizes.append(h.shape[0])
        return (h[:, :1] * one).expand(-1, vocabulary if len(h) == 1 else 8)

    probe = KLProbe(nn.Identity(), [], logits)
    states = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))
    predicted_kl(probe, [(states, states)])
    measured_kl(probe, [states], [states])
    tangent_kl(probe, [(states, states)], [(states, states)], scale=1.0)
    assert max(sizes) == 55  # 55 x 151,936 x 8 bytes are 64 MiB
    assert probe.chunk_tokens(states[:0]) == 1


@pytest.mark.slow
def test_peak_memory_of_the_probe_is_that_of_a_chunk() -> None:
    """Both KLs on 8,192 tokens with a vocabulary of 151,936."""
    tokens, vocabulary = 8192, 151_936
    peak = peak_bytes(
        f"""
from torch import nn
from logra_lightning.objective import Head
from logra_lightning.kl import KLProbe
from logra_lightning.kl.measured_kl import measured_kl
from logra_lightning.kl.predicted_kl import predicted_kl
hidden = torch.randn({tokens}, 8)
probe = KLProbe(nn.Linear(1, 1), [], Head(torch.randn({vocabulary}, 8)).exact_logits)
""",
        """
predicted_kl(probe, [(hidden, hidden)])
measured_kl(probe, [hidden], [hidden + 0.1])
""",
    )
    assert 55 * vocabulary * 8 < peak < tokens * vocabulary * 4 / 10
