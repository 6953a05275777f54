"""Row moments, against the second moment of Adam on the root mean square of each row."""

from __future__ import annotations

import math

import pytest
import torch

from logra_lightning.optim.row_moments import next_moments, row_state
from tests.conftest import Pair
from tests.optim.sketches import RANK, random_sketches, setup


def test_they_are_the_second_moment_that_adam_has_of_each_rows_root_mean_square(pair: Pair) -> None:
    sketches, _ = setup(pair)
    states = {layer.module.weight: row_state(layer.module.weight) for layer in sketches}
    rows = {layer.name: torch.zeros(len(layer.total), requires_grad=True) for layer in sketches}
    adam = torch.optim.Adam(rows.values(), betas=(0.0, 0.75))
    usual_square = 0.0
    for step in range(4):
        sums = random_sketches(sketches, step)
        for name, row in rows.items():
            row.grad = (0.5 * sums[name]).square().mean(dim=1).sqrt().float()
        adam.step()
        squares = {name: value.square().sum(dim=1) for name, value in sums.items()}
        moments, roots, usual = next_moments(sketches, states, squares, clip=0.5, beta2=0.75)
        assert usual == pytest.approx(math.sqrt(usual_square), rel=1e-5)
        usual_square = 0.0
        for layer in sketches:
            wanted = adam.state[rows[layer.name]]["exp_avg_sq"]
            torch.testing.assert_close(moments[layer.name], wanted)
            corrected = wanted.double() / (1 - 0.75 ** (step + 1))
            torch.testing.assert_close(roots[layer.name], corrected.sqrt(), rtol=1e-5, atol=0)
            usual_square += RANK * corrected.sum().item()
            state = states[layer.module.weight]
            assert state["step"] == step  # nothing has been stepped yet
            state["step"] += 1
            state["row_moment"].copy_(moments[layer.name])


def test_only_a_bf16_weight_has_a_residual(pair: Pair) -> None:
    state = row_state(pair.q_proj.weight)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "step": (),
        "row_moment": (9,),
    }
    residual = row_state(pair.to(torch.bfloat16).q_proj.weight)["residual"]
    assert (residual.shape, residual.dtype) == ((9, 12), torch.int16)
