"""The KL of a step in bf16 against fp32, and each way to take it against the others."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from logra_lightning.kl.float32_weights import exact_forwards
from logra_lightning.kl.step_kl import DifferenceKL, StepKL, TangentKL
from logra_lightning.optim.proposal import Proposal
from logra_lightning.policy.head import head_of
from logra_lightning.sketch import SketchBank, find_targets
from tests.kl.probes import CPU, RANK, make_model, make_probe

BUDGETS = (2e-6, 2e-5, 2e-4, 2e-3, 2e-2, 1e-1)  # nats per token


def step_of(kind: type[StepKL], model: Any, temperature: float = 0.8, rate: float = 0.0) -> StepKL:
    """A step of random directions."""
    sketches = SketchBank(find_targets(model), RANK, device=CPU)
    sketches.begin_step(0)
    generator = torch.Generator().manual_seed(2)
    for layer in sketches:
        layer.total.copy_(torch.randn(layer.total.shape, generator=generator))
    scales = {s.name: torch.full((s.module.out_features,), 0.05).double() for s in sketches}
    proposal = Proposal(scales, {}, rate, 1.0)
    probe = make_probe(model, temperature)
    head = head_of(model)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return (head.exact_logits(hidden) if exact else head.logits(hidden)) / temperature

    return kind(replace(probe, logits=logits), proposal, sketches)


@pytest.mark.parametrize("rate", [0.0, 0.02])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_in_bf16_it_is_that_of_fp32_at_any_size(precision: str, rate: float) -> None:
    model = make_model(hidden_size=64, intermediate_size=96)
    if precision == "bf16-true":
        model = model.to(torch.bfloat16)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    own = nullcontext if precision == "bf16-true" else autocast

    exact = step_of(StepKL, model, rate=rate)
    narrow = step_of(TangentKL, model, rate=rate)
    with own():
        q = narrow.predict()
    with exact_forwards(exact.probe, lambda _: None):
        assert q == pytest.approx(exact.predict(), rel=0.05)
    for budget in BUDGETS:
        scale = (budget / q) ** 0.5
        with own():
            measured = narrow.measure(scale)
        with exact_forwards(exact.probe, lambda _: None):
            assert measured == pytest.approx(exact.measure(scale), rel=0.05), budget


def test_two_bf16_forward_passes_show_rounding_instead_of_a_small_update() -> None:
    model = make_model(hidden_size=64, intermediate_size=96).to(torch.bfloat16)
    step = step_of(TangentKL, model)
    scale = (2e-6 / step.predict()) ** 0.5
    shown = step.measure_within(nullcontext, scale)
    assert not 0.5 < shown / 2e-6 < 2


def test_differences_predict_what_derivatives_do() -> None:
    model = make_model()
    exact = step_of(StepKL, model)
    by_difference = step_of(DifferenceKL, copy.deepcopy(model))
    assert by_difference.predict() == pytest.approx(exact.predict(), rel=1e-2)


def test_a_direction_is_made_when_its_layer_runs_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(TangentKL, make_model())
    step.predict()
    made: list[str] = []
    rounded = Proposal.rounded_direction

    def look(self: Proposal, layer: Any, scale: float) -> torch.Tensor:
        made.append(layer.name)
        return rounded(self, layer, scale)

    monkeypatch.setattr(Proposal, "rounded_direction", look)
    changes = step.changes(1.0)
    assert made == []
    step.measure(1.0)
    assert len(made) == len(changes) * len(step.probe.forwards)
