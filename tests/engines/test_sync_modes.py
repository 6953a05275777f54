"""Sync modes on an engine that is a copy, without a Trainer; test_weight_sync has them in runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from logra_lightning.engines import DenseSync, FactorSync, SharedSync, SyncMode
from logra_lightning.engines.sync_modes import PolicyParameter, Sent, TrainedPolicy
from logra_lightning.sketch import Factors
from tests.conftest import make_llama
from tests.copy_engine import CopyEngine


def started(model: nn.Module) -> CopyEngine:
    engine = CopyEngine()
    engine.start(model, [])
    return engine


def test_a_parameter_counts_its_residual() -> None:
    weight = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    residual = torch.zeros(4, 6, dtype=torch.int16)
    parameter = PolicyParameter("w", weight, residual, "w", True)
    assert parameter.nbytes == 96
    assert parameter.weight().nbytes == 96
    assert PolicyParameter("w", weight, None, None, True).nbytes == 48


def test_without_a_row_adam_every_batch_is_sent_but_what_is_frozen() -> None:
    model = make_llama()
    model.lm_head.requires_grad_(False)
    engine, mode, policy = started(model), DenseSync(), TrainedPolicy(model, None)
    everything = sum(p.nbytes for p in model.parameters())
    assert mode.begin(engine, policy, version=0) == everything
    sent = everything - model.lm_head.weight.nbytes
    assert mode.sync(engine, policy, version=1) == Sent(sent, 2.0)
    assert mode.sync(engine, policy, version=1) == Sent(0, 2.0)  # no step in between
    assert len(engine.loaded[1]) == len(engine.loaded[0]) - 1
    assert mode.plan(mode.parameters(policy)) == f"{len(engine.loaded[1])} weights travel densely"


def test_factors_of_an_earlier_run_are_forgotten() -> None:
    model = make_llama()
    engine, mode, policy = started(model), FactorSync(), TrainedPolicy(model, None)
    mode.take(Factors(5, 0, 5, "rademacher", 1.0, {}))
    mode.begin(engine, policy, version=7)
    mode.take(Factors(7, 0, 7, "rademacher", 1.0, {}))
    assert mode.sync(engine, policy, version=8) == Sent(0, 1.0)
    assert [factors.version for factors in engine.updates[0]] == [7]


def test_a_gap_sends_all_weights_and_says_so() -> None:
    model = make_llama()
    engine, mode, policy = started(model), FactorSync(), TrainedPolicy(model, None)
    everything = mode.begin(engine, policy, version=0)
    mode.take(Factors(1, 0, 1, "rademacher", 1.0, {}))
    with pytest.warns(UserWarning, match=r"holds policy version 0 and the policy is 2.*\[1\]"):
        assert mode.sync(engine, policy, version=2) == Sent(everything, 2.0)
    assert engine.policy_version == 2


def test_shared_memory_is_refreshed_once_for_each_new_version() -> None:
    model = make_llama()
    engine, mode, policy = started(model), SharedSync(), TrainedPolicy(model, None)
    assert mode.begin(engine, policy, version=3) == 0
    assert mode.sync(engine, policy, version=4) == Sent(0, 0.0)
    assert mode.sync(engine, policy, version=4) == Sent(0, 0.0)
    assert engine.calls == ["share", "refresh", "refresh"]


def test_a_mode_must_say_how_it_begins_and_syncs() -> None:
    with pytest.raises(TypeError, match="begin.*sync"):
        SyncMode()  # type: ignore[abstract]
