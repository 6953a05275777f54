"""Measured KL against torch's own, and where the prediction does not hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from logra_lightning.kl.kl_probe import KLProbe
from logra_lightning.kl.measured_kl import LATER, kl_divergence, measured_kl, tangent_kl
from logra_lightning.kl.predicted_kl import predicted_kl, tangents
from tests.kl.probes import make_changes, make_model, make_probe, mean


def test_kl_divergence_is_that_of_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    z, other = (torch.randn(4, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    p, q = (torch.distributions.Categorical(logits=x) for x in (z, other))
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(kl_divergence(z, other), expected)


def test_chunks_do_not_change_the_sum() -> None:
    model = make_model()
    probe = make_probe(model)
    old, new = probe.hidden(), probe.hidden(make_changes(model))
    for chunk in (1, 7):
        torch.testing.assert_close(
            measured_kl(probe, old, new, chunk_tokens=chunk), measured_kl(probe, old, new)
        )


def test_the_quadratic_can_be_far_off_where_a_step_is_large() -> None:
    """Why the KL of the very update is measured too."""
    model = make_model()
    probe, changes = make_probe(model), make_changes(model, size=2.0)
    pairs = tangents(probe, changes)
    predicted = mean(predicted_kl(probe, pairs))
    kl = mean(measured_kl(probe, [h for h, _ in pairs], probe.hidden(changes)))
    assert max(kl / predicted, predicted / kl) > 5


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_two_derivatives_give_the_kl_of_a_change_of_third_degree(
    scale: float, chunk: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    z, *terms = (torch.randn(5, 9, dtype=torch.float64, generator=generator) for _ in range(4))

    def change(a: float) -> torch.Tensor:  # of the logits, after the fraction a of the whole update
        return sum(term * a**n for n, term in enumerate(terms, 1))

    def derivative(a: float) -> torch.Tensor:
        return sum(n * term * a ** (n - 1) for n, term in enumerate(terms, 1))

    probe = KLProbe(nn.Linear(1, 1), [], lambda hidden: hidden)
    later = (z + change(scale * LATER), scale * derivative(scale * LATER))
    found = tangent_kl(probe, [(z, derivative(0.0))], [later], scale=scale, chunk_tokens=chunk)
    expected = kl_divergence(z, z + change(scale)).sum()
    torch.testing.assert_close(found, torch.stack([expected, expected.new_tensor(5)]))
