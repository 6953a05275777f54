"""A probe finds where a model stops being finite."""

from __future__ import annotations

import torch

from logra_lightning.kl import first_not_finite
from tests.kl.probes import make_model, make_probe


def test_the_first_module_that_is_not_finite_is_named() -> None:
    model = make_model()
    probe = make_probe(model)
    assert first_not_finite(model, probe.hidden) == ""
    model.model.layers[1].mlp.gate_proj.weight.data[3, 2] = torch.nan
    assert first_not_finite(model, probe.hidden) == "model.layers.1.mlp.gate_proj"


def test_the_head_is_named_where_only_its_logits_are_not_finite() -> None:
    model = make_model()
    probe = make_probe(model)
    model.lm_head.weight.data[3, 2] = torch.nan

    def run() -> list[torch.Tensor]:
        return [probe.logits(hidden) for hidden in probe.hidden()]

    assert first_not_finite(model, run) == "lm_head"
    assert first_not_finite(model, probe.hidden) == ""
