"""A probe finds where a model stops being finite."""

from __future__ import annotations

import torch

from logra_lightning.kl.kl_probe import first_not_finite
from tests.kl.probes import make_model, make_probe


def test_the_first_module_that_is_not_finite_is_named() -> None:
    model = make_model()
    probe = make_probe(model)
    assert first_not_finite(probe) == ""
    model.model.layers[1].mlp.gate_proj.weight.data[3, 2] = torch.nan
    assert first_not_finite(probe) == "model.layers.1.mlp.gate_proj"
