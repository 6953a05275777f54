"""Messages to workers survive as bytes; masters in shards of a weight merge as the whole does."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from logra_lightning.engines.process_state import random_state_kept
from logra_lightning.engines.vllm_worker import WeightReceiver, WorkerExtension, decode, encode
from logra_lightning.engines.weights import PolicyWeight
from logra_lightning.sketch import Factors, merge_
from logra_lightning.sketch.master import join, split


def test_messages_survive_as_bytes() -> None:
    weight, residual = split(torch.randn(3, 4))
    weights = [PolicyWeight("a", weight, residual, "policy.a"), PolicyWeight("b", weight)]
    factors = Factors(3, 1, 2, "gaussian", 0.5, {"policy.a": weight})
    got_factors, got_weights = decode(encode(([factors], weights)))
    assert got_factors[0].directions["policy.a"].dtype == torch.bfloat16
    assert torch.equal(got_factors[0].directions["policy.a"], weight)
    assert (got_factors[0].version, got_factors[0].projection) == (3, "gaussian")
    assert torch.equal(got_weights[0].residual, residual)
    assert got_weights[1].residual is None


def test_a_message_cannot_run_code() -> None:
    with pytest.raises(pickle.UnpicklingError):
        decode(encode(print))


class RowParallelLinear(nn.Linear):
    """The left or right half of a layer with 10 inputs and 6 outputs."""

    def __init__(self, index: int) -> None:
        super().__init__(5, 6, bias=False)
        self.tp_rank, self.input_size = index, 10


class ColumnParallelLinear(nn.Linear):
    """The upper or lower half."""

    def __init__(self, index: int) -> None:
        super().__init__(10, 3, bias=False)
        self.tp_rank, self.tp_size, self.output_size = index, 2, 6


@pytest.mark.parametrize("kind", [RowParallelLinear, ColumnParallelLinear])
@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16])
def test_shards_merge_as_the_whole_does(kind: Any, engine_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(6, 10, generator=generator)
    receivers = [
        WeightReceiver(nn.ModuleDict({"up": kind(index).to(engine_dtype)})) for index in (0, 1)
    ]
    for receiver in receivers:
        assert receiver.shapes() == {"up.weight": [6, 10]}
        receiver.load([PolicyWeight("up.weight", master, None, "policy.up")])
    for version in range(20):
        direction = (torch.randn(6, 4, generator=generator) * 1e-3).to(torch.bfloat16)
        factors = Factors(version, 0, version, "rademacher", 0.99, {"policy.up": direction})
        entries = factors.entries("policy.up", 10, device=torch.device("cpu"))
        merge_(master, direction, entries, decay=0.99)
        for receiver in receivers:
            assert receiver.merge([factors], []) is None
    parts = []
    for receiver in receivers:
        weight = receiver._parameters["up.weight"]
        residual = receiver._residuals.get(("up.weight", 0))
        parts.append(weight if residual is None else join(weight, residual))
    assert torch.equal(torch.cat(parts, dim=int(kind is RowParallelLinear)), master)


def test_a_load_without_projection_ends_the_factors() -> None:
    receiver = WeightReceiver(nn.ModuleDict({"up": nn.Linear(4, 4, bias=False)}))
    receiver.load([PolicyWeight("up.weight", torch.ones(4, 4), None, "policy.up")])
    receiver.load([PolicyWeight("up.weight", torch.ones(4, 4))])
    directions = {"policy.up": torch.ones(4, 2, dtype=torch.bfloat16)}
    misfit = receiver.merge([Factors(0, 0, 0, "rademacher", 1.0, directions)], [])
    assert misfit == (0, ["policy.up"], [])
    assert torch.equal(receiver.views()["up.weight"], torch.ones(4, 4))


def test_the_extension_answers_bytes_with_bytes() -> None:
    extension = WorkerExtension()
    model = nn.ModuleDict({"up": nn.Linear(4, 3, bias=False)})
    extension.model_runner = type("", (), {"get_model": lambda self: model})()
    assert extension.logra_call("shapes", ()) == {"up.weight": [3, 4]}
    assert decode(extension.logra_call("shapes", encode(()))) == {"up.weight": [3, 4]}


def test_a_seed_fixes_all_that_samplers_draw_from() -> None:
    """vLLM's sampler on a CPU draws from torch, that on a GPU from numpy."""

    def draw(seed: int) -> tuple[float, float, float]:
        WorkerExtension().logra_seed(seed)
        return torch.rand(()).item(), np.random.rand(), random.random()

    with random_state_kept():
        first = draw(2**40 + 1)
        assert draw(2**40 + 1) == first
        assert all(a != b for a, b in zip(draw(2**40 + 2), first, strict=True))
