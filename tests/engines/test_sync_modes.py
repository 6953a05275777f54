"""Each way to sync weights, on an engine that is a copy; test_weight_sync has them in runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from logra_lightning import SketchAccumulation
from logra_lightning.callbacks import WeightSync
from logra_lightning.engines import DenseSync, FactorSync, SharedSync, SyncMode
from logra_lightning.engines.sync_modes import PolicyParameter, Sent, TrainedPolicy
from logra_lightning.sketch import Factors
from tests.command_line import parse
from tests.conftest import ROOT, make_llama
from tests.copy_engine import CopyEngine
from tests.runs import data, fit, policy, trainer


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


# A mode of the user's own, and names in YAML.


class EveryOther(FactorSync):
    """A mode of somebody else's: it merges the factors of several batches at once."""

    name, number = "every other", 3.0

    def __init__(self, batches: int = 2) -> None:
        super().__init__()
        self.batches = batches

    def sync(self, engine: Any, policy: Any, *, version: int) -> Sent:
        if version % self.batches:
            engine.policy_version = version  # samples from older weights on purpose
            return Sent(0, self.number)
        engine.policy_version = version - self.batches
        return replace(super().sync(engine, policy, version=version), number=self.number)


@pytest.mark.usefixtures("private_datasets_cache")
def test_a_mode_of_ones_own_takes_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, sync = CopyEngine(), WeightSync(mode=EveryOther())
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fitted = trainer(tmp_path, steps=4, callbacks=[SketchAccumulation(), sync])
        fitted.fit(policy(engine=engine, group_size=8), datamodule=data(tmp_path))
    assert [[f.version for f in updates] for updates in engine.updates] == [[0, 1], [2, 3]]
    assert fitted.callback_metrics["sync/mode"] == 3.0
    assert "weight sync every other: " in sync.summary()
    assert any(
        "mode every other; 14 weights travel as fac" in r.getMessage() for r in caplog.records
    )
    # What cannot be sent as factors is sent densely, whoever wrote the mode.
    engine = CopyEngine(sleep="weights")
    fit(tmp_path, policy(engine=engine), steps=1, callbacks=[SketchAccumulation(), sync])
    assert [call for call in engine.calls if call != "sleep"] == ["load"] * 2


OWN = {"class_path": f"{EveryOther.__module__}.EveryOther", "init_args": {"batches": 3}}


@pytest.mark.parametrize("mode", ["factors", "shared", "dense", OWN, None], ids=str)
def test_modes_are_named_in_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str | dict[str, Any] | None
) -> None:
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["model"]["engine"] = {"class_path": "logra_lightning.engines.TorchEngine"}
    if mode is not None:
        config["weight_sync"] = {"mode": mode}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    cli = parse(monkeypatch, "fit", "--config", str(tmp_path / "x.yaml"))
    (sync,) = [c for c in cli.trainer.callbacks if isinstance(c, WeightSync)]
    if isinstance(mode, dict):
        assert type(sync.mode).__name__ == "EveryOther"
        assert sync.mode.batches == 3  # type: ignore[union-attr]
    else:
        assert sync.mode == (mode or "factors")
    printed = yaml.safe_load(cli.parser.dump(cli.config))
    assert printed["fit"]["weight_sync"]["mode"] == (mode or "factors")
