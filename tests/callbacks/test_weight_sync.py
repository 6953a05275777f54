"""WeightSync: versions, modes and what travels, on an engine that is a copy; then on vLLM."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from logra_lightning import AdamWOptions, PolicyModule, RelativeRowAdam, Reward, SketchAccumulation
from logra_lightning.callbacks import EngineCheck, WeightSync
from logra_lightning.engines import VLLMEngine
from logra_lightning.optim import RowAdam
from logra_lightning.sketch import Factors
from tests import runs
from tests.copy_engine import CopyEngine, disturb
from tests.runs import data, trainer

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def policy(**options: Any) -> PolicyModule:
    """Groups and steps of a size that every batch has a signal."""

    def optimizer(*args: Any) -> RowAdam:
        return RelativeRowAdam(*args, update_ratio=2e-3)

    return runs.policy(**({"group_size": 8, "optimizer": optimizer} | options))


class Watch(Callback):
    """Compares engine and policy bit for bit after each batch, and keeps what was logged."""

    def __init__(self, sync: WeightSync) -> None:
        self.sync = sync
        self.logged: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.sync.verify(trainer, pl_module)
        metrics = trainer.callback_metrics
        self.logged.append((metrics["sync/mode"].item(), metrics["sync/bytes"].item()))


def run(
    tmp_path: Path, module: PolicyModule, sync: WeightSync, steps: int = 3, **options: Any
) -> Watch:
    watch = Watch(sync)
    callbacks = [SketchAccumulation(), sync, watch, *options.pop("callbacks", [])]
    ckpt_path = options.pop("ckpt_path", None)
    fitted = trainer(tmp_path, steps=steps, callbacks=callbacks, **options)
    fitted.fit(module, datamodule=data(tmp_path), ckpt_path=ckpt_path)
    return watch


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("rule", [RelativeRowAdam, RowAdam])
def test_factors_keep_engine_and_policy_bit_equal(
    tmp_path: Path, precision: str, rule: type[RowAdam]
) -> None:
    def optimizer(*args: Any) -> RowAdam:
        if rule is RowAdam:
            return RowAdam(*args, lr=1e-3, weight_decay=0.1)
        return RelativeRowAdam(*args, update_ratio=2e-3)

    engine = CopyEngine()
    sync = WeightSync()
    watch = run(tmp_path, policy(engine=engine, optimizer=optimizer), sync, precision=precision)
    assert [call for call in engine.calls if call != "sleep"] == ["load", "merge", "merge", "merge"]
    # D of each weight, bf16: two layers of q, k, v, o (128 -> 128, 64, 64, 128) and an MLP of 256
    rows = 2 * (128 + 64 + 64 + 128 + 256 + 256 + 128)
    assert watch.logged == [(1.0, rows * 32 * 2)] * 3
    assert f"{rows * 64:,} bytes per step" in sync.summary()


def test_the_engine_sleeps_while_the_policy_trains(tmp_path: Path) -> None:
    engine = CopyEngine()
    run(tmp_path, policy(engine=engine), WeightSync(), steps=2)
    assert engine.calls == ["load", "sleep", "merge", "sleep", "merge"]


def test_four_steps_per_batch_are_applied_in_order_at_once(tmp_path: Path) -> None:
    engine = CopyEngine()
    watch = run(tmp_path, policy(engine=engine, inner_epochs=4), WeightSync(), steps=8)
    assert [[f.version for f in updates] for updates in engine.updates] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [mode for mode, _ in watch.logged] == [1.0, 1.0]


def test_a_gap_becomes_one_dense_sync_that_is_told(tmp_path: Path) -> None:
    class Lose(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 8:
                sync._mode._queue.pop(1)  # type: ignore[attr-defined]

    engine, sync = CopyEngine(), WeightSync()
    module = policy(engine=engine, inner_epochs=4)
    watch = Watch(sync)
    fitted = trainer(tmp_path, steps=12, callbacks=[SketchAccumulation(), Lose(), sync, watch])
    with pytest.warns(
        UserWarning, match=r"holds policy version 4 and the policy is 8.*\[4, 6, 7\]"
    ):
        fitted.fit(module, datamodule=data(tmp_path))
    assert [call for call in engine.calls if call != "sleep"] == ["load", "merge", "load", "merge"]
    assert [mode for mode, _ in watch.logged] == [1.0, 2.0, 1.0]


def test_a_batch_without_signal_sends_nothing(tmp_path: Path) -> None:
    def same(completion: str) -> float:
        return 1.0

    engine = CopyEngine()
    watch = run(tmp_path, policy(engine=engine, rewards=[Reward(same)]), WeightSync())
    assert watch.logged == [(1.0, 0.0)] * 3
    assert engine.policy_version == 3
    assert all(not f.directions for updates in engine.updates for f in updates)


def test_others_that_train_travel_along(tmp_path: Path) -> None:
    engine = CopyEngine()
    module = policy(engine=engine, train_others=True, adamw=AdamWOptions(lr=1e-3))
    start = {name: p.clone() for name, p in _copied(module).items()}
    watch = run(tmp_path, module, WeightSync(), precision="bf16-true")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert not torch.equal(engine.copy.get_parameter(name), start[name])
    factors = sum(f.nbytes for f in engine.updates[0])
    dense = sum(p.nbytes for name, p in engine.copy.named_parameters() if "_proj" not in name)
    assert watch.logged == [(1.0, factors + dense)] * 3


def _copied(module: PolicyModule) -> dict[str, torch.Tensor]:
    from logra_lightning.policy.load import load_policy

    loaded = load_policy(module.model_path, dtype=torch.bfloat16)
    return {name: p.detach() for name, p in loaded.named_parameters()}


@pytest.mark.parametrize("how", ["mode", "strategy"])
def test_dense_sends_what_trains(tmp_path: Path, how: str) -> None:
    engine = CopyEngine()
    options: dict[str, Any] = {"strategy": "auto"} if how == "strategy" else {}
    sync = WeightSync(mode="dense") if how == "mode" else WeightSync()
    watch = run(tmp_path, policy(engine=engine), sync, **options)
    assert [call for call in engine.calls if call != "sleep"] == ["load"] * 4
    assert all("_proj" in name for names in engine.loaded[1:] for name in names)
    assert {mode for mode, _ in watch.logged} == {2.0}


def test_shared_weights_send_nothing(tmp_path: Path) -> None:
    engine = CopyEngine()
    watch = run(tmp_path, policy(engine=engine), WeightSync(mode="shared"))
    expected = ["share", "refresh", *["sleep", "refresh"] * 3]
    assert engine.calls == expected
    assert watch.logged == [(0.0, 0.0)] * 3


def test_an_engine_that_drops_its_weights_gets_all_of_them_each_time(tmp_path: Path) -> None:
    engine = CopyEngine(sleep="weights")
    run(tmp_path, policy(engine=engine), WeightSync())
    assert [call for call in engine.calls if call != "sleep"] == ["load"] * 4
    everything = [name for name, _ in engine.copy.named_parameters()]
    assert engine.loaded == [everything] * 4


def saving(folder: Path) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=1)
    return {"callbacks": [checkpoint], "enable_checkpointing": True}


def test_dense_sends_nothing_after_a_step_that_changed_nothing(tmp_path: Path) -> None:
    def same(completion: str) -> float:
        return 1.0

    engine = CopyEngine()
    module = policy(engine=engine, rewards=[Reward(same)])
    watch = run(tmp_path, module, WeightSync(mode="dense"))
    assert [call for call in engine.calls if call != "sleep"] == ["load"]
    assert watch.logged == [(2.0, 0.0)] * 3


@pytest.mark.parametrize("mode", ["shared", "dense"])
def test_nobody_keeps_the_factors_of_the_last_step(tmp_path: Path, mode: Any) -> None:
    made: list[weakref.ref[Factors]] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            optimizer: Any = trainer.optimizers[0]
            take = optimizer.take_factors

            def watched() -> Factors:
                factors = take()
                made.append(weakref.ref(factors))
                return factors

            optimizer.take_factors = watched

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            kept.append((trainer.optimizers[0].factors, made[-1]()))  # type: ignore[attr-defined]

    kept: list[Any] = []
    run(tmp_path, policy(engine=CopyEngine()), WeightSync(mode=mode), callbacks=[Look()])
    assert kept == [(None, None)] * 3


def test_a_resumed_run_starts_with_all_weights(tmp_path: Path) -> None:
    last = tmp_path / "a" / "last.ckpt"
    run(tmp_path, policy(engine=CopyEngine()), WeightSync(), 2, **saving(last.parent))
    engine = CopyEngine()
    options = saving(last.parent) | {"ckpt_path": str(last)}
    resumed = run(tmp_path, policy(engine=engine), WeightSync(), 3, **options)
    assert [call for call in engine.calls if call != "sleep"] == ["load", "merge"]
    assert engine.updates[0][0].version == 2
    assert len(resumed.logged) == 1


def test_verification_stops_the_run_with_the_name(tmp_path: Path) -> None:
    class Damage(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                disturb(engine, "model.layers.1.mlp.up_proj.weight")

    engine = CopyEngine()
    sync = WeightSync(verify_every=2)
    fitted = trainer(tmp_path, steps=4, callbacks=[SketchAccumulation(), sync, Damage()])
    with pytest.raises(
        RuntimeError, match=r"after step 2 .* in 1: 'model.layers.1.mlp.up_proj.wei"
    ):
        fitted.fit(policy(engine=engine), datamodule=data(tmp_path))


def test_without_the_callback_a_stale_engine_stops_the_run(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, steps=3)
    with pytest.raises(RuntimeError, match="samples from policy version 0, but 1 steps"):
        fitted.fit(policy(engine=CopyEngine()), datamodule=data(tmp_path))


def test_an_engine_without_weights_of_its_own_needs_no_sync(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    sync = WeightSync()
    fitted = trainer(tmp_path, callbacks=[SketchAccumulation(), sync])
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fitted.fit(policy(), datamodule=data(tmp_path))
    told = [r.getMessage() for r in caplog.records if "WeightSync" in r.getMessage()]
    assert told == ["WeightSync is inactive: TorchEngine samples from the weights that train."]
    assert "sync/bytes" not in fitted.callback_metrics
    assert sync.summary() == "engine: TorchEngine"


def test_what_is_frozen_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        run(tmp_path, policy(engine=CopyEngine()), WeightSync())
    told = [r.getMessage() for r in caplog.records if "WeightSync" in r.getMessage()]
    assert len(told) == 1
    assert "14 weights travel as factors, 0 densely, 6 are frozen (embed_tokens, " in told[0]


class WithCritic(PolicyModule):
    """Sketches a network that the engine knows nothing of."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "critic"):
            self.critic = nn.ModuleDict({"up_proj": nn.Linear(32, 32, bias=False)})

    def token_logprobs(self, microbatch: Any) -> Any:
        logprobs, entropy = super().token_logprobs(microbatch)
        return logprobs + 0 * self.critic["up_proj"](torch.ones(32)).sum(), entropy


def test_what_is_sketched_outside_the_policy_stays_here(tmp_path: Path) -> None:
    engine = CopyEngine()
    module = policy(engine=engine)
    module.__class__ = WithCritic
    run(tmp_path, module, WeightSync())
    assert len(engine.updates) == 3
    assert all(name.startswith("policy.") for name in engine.updates[0][0].directions)


def test_mistakes_are_told() -> None:
    with pytest.raises(
        ValueError, match="must be one of factors, shared, dense, or a SyncMode, got 'lo"
    ):
        WeightSync(mode="lora")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify_every must not be negative"):
        WeightSync(verify_every=-1)


def test_a_module_without_an_engine_is_told_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"needs LightningModule to have `policy`"):
        WeightSync().on_train_start(Trainer(logger=False), LightningModule())


# On vLLM.


def vllm_engine(**options: Any) -> VLLMEngine:
    return VLLMEngine(kv_cache_memory_bytes=1 << 24, **options)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("mode", "precision"), [("factors", "bf16-true"), ("dense", "32-true"), ("shared", "bf16-true")]
)
def test_vllm_follows_the_policy_bit_for_bit(tmp_path: Path, mode: Any, precision: str) -> None:
    pytest.importorskip("vllm")
    options = {"train_others": True, "adamw": AdamWOptions(lr=1e-3)} if mode != "shared" else {}
    module = policy(engine=vllm_engine(), **options)
    watch = run(tmp_path, module, WeightSync(mode=mode, verify_every=1), precision=precision)
    assert len(watch.logged) == 3
    assert module.engine._llm is None  # type: ignore[union-attr]


@pytest.mark.vllm
def test_a_run_that_fails_closes_its_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")

    def fails(completion: str) -> float:
        raise ZeroDivisionError

    module = policy(engine=vllm_engine(), rewards=[Reward(fails)])
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError for row"):
        run(tmp_path, module, WeightSync())
    assert module.engine._llm is None  # type: ignore[attr-defined]
    assert VLLMEngine._running is None  # another one can be started


@pytest.mark.vllm
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_resumed_vllm_run_equals_the_run_that_never_stopped(
    tmp_path: Path, precision: str
) -> None:
    pytest.importorskip("vllm")

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def train(**options: Any) -> dict[str, torch.Tensor]:
        module = policy(engine=vllm_engine())
        options |= {"precision": precision, "callbacks": [EngineCheck(), Save()]}
        run(tmp_path, module, WeightSync(), steps=5, **options)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    straight = train()
    resumed = train(ckpt_path=tmp_path / "half.ckpt")
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
