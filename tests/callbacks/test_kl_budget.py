"""KLBudget: what a step may cost, what is not finite, and what survives a resume."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import Tensor, nn

from logra_lightning import PolicyModule, RelativeRowAdam, Reward, RowAdam, SketchAccumulation
from logra_lightning.callbacks import KLBudget, WeightSync
from logra_lightning.kl import KLProbe
from logra_lightning.kl.budget import Schedule
from logra_lightning.kl.step_kl import StepKL
from logra_lightning.optim import step_counts
from tests.copy_engine import CopyEngine
from tests.runs import data, digits, policy, trainer, weights

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


class Record(Callback):
    """Values logged at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def __getitem__(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


def run(
    tmp_path: Path, budget: KLBudget, module: Any = None, steps: int = 3, **options: Any
) -> Record:
    record = Record()
    callbacks = [SketchAccumulation(), budget, *options.pop("callbacks", []), record]
    ckpt_path = options.pop("ckpt_path", None)
    fitted = trainer(tmp_path, steps=steps, callbacks=callbacks, **options)
    module = module or policy(group_size=8)
    fitted.fit(module, datamodule=data(tmp_path), ckpt_path=ckpt_path)
    return record


class EveryStep(KLBudget):
    """Remembers budget, predicted and measured KL of each optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[float, float, float]] = []

    def _log(
        self, pl_module: Any, budget: float, predicted: float, measured: float, n: int
    ) -> None:
        self.seen.append((budget, predicted, measured))
        super()._log(pl_module, budget, predicted, measured, n)


def test_each_step_of_a_batch_has_a_budget_of_its_own(tmp_path: Path) -> None:
    budget = EveryStep(1e-3, 1e-4, 8, "linear", max_scale=100, bf16_every=0)
    run(tmp_path, budget, policy(group_size=8, inner_epochs=2, minibatches=2), steps=8)
    schedule = Schedule(1e-3, 1e-4, 8, "linear")
    assert [seen[0] for seen in budget.seen] == [schedule(step) for step in range(8)]
    for allowed, predicted, measured in budget.seen:
        assert predicted == pytest.approx(allowed)
        assert 0.5 * allowed < measured < 2 * allowed


# What a step costs.


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("method", ["forward_ad", "fp32", "finite_difference"])
def test_steps_cost_what_the_budget_allows(tmp_path: Path, precision: str, method: Any) -> None:
    budget = KLBudget(3e-4, 1e-4, 3, method=method, probe_rollouts=64, max_scale=100, bf16_every=0)
    record = run(tmp_path, budget, precision=precision)
    assert record["kl/budget"] == pytest.approx([3e-4, 2e-4, 1e-4])
    assert record["kl/predicted"] == pytest.approx(record["kl/budget"], rel=1e-4)
    for ratio in record["kl/ratio"]:
        assert 0.8 < ratio < 1.25
    assert record["kl/backtracks"] == [0, 0, 0]


@pytest.mark.parametrize("rule", [RelativeRowAdam, RowAdam])
def test_measured_kl_is_that_of_the_merged_weights(tmp_path: Path, rule: type[RowAdam]) -> None:
    """The same rollouts under the weights before and after, in plain forward passes."""

    def optimizer(*args: Any) -> RowAdam:
        if rule is RowAdam:
            return RowAdam(*args, lr=1e-2, weight_decay=1.0)
        return RelativeRowAdam(*args, update_ratio=1e-2)

    found = []

    class Compare(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            self.before = self.logits(module)

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            log_p, log_q = self.before, self.logits(module)
            kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
            found.append(kl.mean().item())

        @torch.no_grad()
        def logits(self, module: Any) -> Tensor:
            parts = []
            for microbatch in module.pack(module._minibatch):
                logits = module.policy(microbatch.input_ids).logits[:, :-1]
                parts.append(logits[microbatch.completion_mask[:, 1:]].double())
            return torch.log_softmax(torch.cat(parts), dim=-1)

    budget = KLBudget(1e-2, 1e-2, probe_rollouts=10_000, max_scale=100)
    module = policy(group_size=8, optimizer=optimizer)
    record = run(tmp_path, budget, module, callbacks=[Compare()])
    assert record["kl/measured"] == pytest.approx(found, rel=1e-2)
    assert min(found) > 1e-3


def test_a_step_that_goes_too_far_is_shrunk(tmp_path: Path) -> None:
    """The quadratic is far off there: the scale it gives would cost many times the budget."""
    budgets = {"start": 3.0, "end": 3.0, "max_scale": 1e6, "probe_rollouts": 64}
    free = run(tmp_path, KLBudget(backtrack=False, **budgets), steps=1)
    bound = run(tmp_path, KLBudget(tolerance=1.0, max_backtracks=8, **budgets), steps=1)
    assert not 0.5 < free["kl/ratio"][0] < 2
    if free["kl/measured"][0] > 3.0:
        assert bound["kl/backtracks"][0] > 0
    assert bound["kl/measured"][0] <= 3.0


class Cliff(PolicyModule):
    """What an update does to its hidden states is `steepness` times what the derivative says."""

    steepness: float

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        probe = super().kl_probe(num_rollouts, max_tokens)
        (forward,) = probe.forwards
        before = []

        def steep() -> Tensor:
            hidden = forward()
            primal, tangent = fwAD.unpack_dual(hidden)
            if tangent is not None:
                before.append(primal)
                return hidden
            if self.steepness == math.inf:  # however small the step
                return -before[0]
            return before[0] + self.steepness * (hidden - before[0])

        return replace(probe, forwards=[steep])


def cliff(steepness: float, **options: Any) -> PolicyModule:
    module = policy(group_size=8, **options)
    module.__class__ = Cliff
    module.steepness = steepness  # type: ignore[assignment]
    return module


def test_backtracking_ends_below_the_tolerance_and_is_counted(tmp_path: Path) -> None:
    budget = KLBudget(1e-4, 1e-4, probe_rollouts=2, max_scale=100)
    record = run(tmp_path, budget, cliff(4.0), steps=1)
    assert 1 <= record["kl/backtracks"][0] <= 4
    assert record["kl/measured"][0] <= 2e-4
    assert record["optim/rejected_steps"] == [0.0]
    assert record["optim/step_scale"][0] > 0


def test_an_update_that_stays_too_large_is_rejected(tmp_path: Path) -> None:
    engine = CopyEngine()
    module = cliff(math.inf, engine=engine)
    budget = KLBudget(1e-4, 1e-4, probe_rollouts=2, max_scale=100)
    fitted = run(tmp_path, budget, module, steps=2, callbacks=[WeightSync()])
    start = policy()
    run(tmp_path, KLBudget(), start, steps=1, limit_train_batches=0)
    assert fitted["optim/rejected_steps"] == [1.0, 2.0]
    assert fitted["optim/step_scale"] == [0.0, 0.0]
    assert fitted["kl/backtracks"] == [4.0, 4.0]
    for name, value in weights(start).items():
        assert torch.equal(weights(module)[name], value), name
    assert all(not f.directions for updates in engine.updates for f in updates)
    assert budget.state_dict() == {"mismatch": None}


def test_updates_that_are_all_rejected_are_told_and_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit lowered from 20 to 3."""
    monkeypatch.setattr(step_counts, "MAX_REJECTED_STEPS", 3)
    budget = KLBudget(1e-4, 1e-4, probe_rollouts=2, max_scale=100, max_backtracks=0)
    options = r"times the budget of 1.0e-04: raise kl_budget.tolerance or kl_budget.max_backtracks"
    with (
        pytest.warns(UserWarning, match=f"step 2: 3 updates in a row were rejected; .*{options}"),
        pytest.raises(RuntimeError, match=f"step 3: 4 updates in a row were .*{options}"),
    ):
        run(tmp_path, budget, cliff(math.inf), steps=5)


def test_weights_change_once_and_the_engine_sees_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CopyEngine()
    seen: list[Tensor] = []
    measure = StepKL.measure

    def measure_and_look(self: StepKL, scale: float) -> float:
        measured = measure(self, scale)
        model = self.probe.model
        seen.append(model.get_parameter("model.layers.0.mlp.up_proj.weight").clone())
        return measured

    monkeypatch.setattr(StepKL, "measure", measure_and_look)
    start = policy()
    run(tmp_path, KLBudget(), start, steps=1, limit_train_batches=0)
    module = policy(group_size=8, engine=engine)
    run(tmp_path, KLBudget(), module, steps=1, callbacks=[WeightSync()])
    name = "policy.model.layers.0.mlp.up_proj.weight"
    assert seen
    assert all(torch.equal(weight, weights(start)[name]) for weight in seen)
    assert [call for call in engine.calls if call != "sleep"] == ["load", "merge"]


# What is not finite.


class PoisonStep(Callback):
    """A NaN in one layer's gradient at one step."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        if trainer.global_step in self.steps:
            sketches = trainer.strategy.sketches  # type: ignore[attr-defined]
            sketches["policy.model.layers.1.self_attn.v_proj"].total[0, 0] = math.nan


def test_a_step_with_nan_changes_nothing_but_the_count(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            kept.append((weights(module), budget.state_dict()))

    engine = CopyEngine()
    budget = KLBudget(probe_rollouts=4)
    with pytest.warns(
        UserWarning, match=r"step 2: .* first in 'policy.model.layers.1.self_attn.v_p"
    ):
        record = run(
            tmp_path,
            budget,
            policy(group_size=8, engine=engine),
            steps=4,
            callbacks=[PoisonStep(2), WeightSync(), Keep()],
        )
    assert record["optim/skipped_steps"] == [0, 0, 1, 1]
    assert [math.isnan(value) for value in record["kl/measured"]] == [False, False, True, False]
    for name, value in kept[1][0].items():
        assert torch.equal(kept[2][0][name], value), name
    assert kept[1][1] == kept[2][1]
    assert not engine.updates[2][0].directions
    assert record["optim/step_scale"][3] > 0


def test_a_policy_that_is_not_finite_is_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, _: Any) -> None:
            if trainer.global_step == 2:
                module.policy.model.norm.weight.data[0] = math.nan

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    module = policy(
        group_size=8,
        optimizer=lambda *args: RelativeRowAdam(*args, update_ratio=1e-3, max_skipped_steps=0),
    )
    fitted = trainer(
        tmp_path,
        steps=4,
        callbacks=[SketchAccumulation(), Poison(), KLBudget(), saving],
        enable_checkpointing=True,
    )
    with pytest.raises(
        FloatingPointError, match="predicted KL is nan, from 'model.norm' on; nothing"
    ):
        fitted.fit(module, datamodule=data(tmp_path))
    assert (tmp_path / "step=2.ckpt").is_file()


def test_equal_rewards_are_no_step(tmp_path: Path) -> None:
    def same(completion: str) -> float:
        return 1.0

    engine = CopyEngine()
    module = policy(rewards=[Reward(same)], engine=engine)
    record = run(tmp_path, KLBudget(), module, callbacks=[WeightSync()])
    assert record["optim/step_scale"] == [0, 0, 0]
    assert record["kl/budget"][0] == pytest.approx(2e-4)
    assert record["kl/predicted"] == record["kl/measured"] == [0, 0, 0]
    assert record["sync/bytes"] == [0, 0, 0]


# The mismatch between engine and trainer.


@pytest.mark.parametrize(("subtraction", "left"), [(True, 0.04), (False, 0.05)])
def test_the_mismatch_is_subtracted_with_its_sign_where_that_is_asked_for(
    tmp_path: Path, subtraction: bool, left: float
) -> None:
    class Shifted(CopyEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            groups = super().generate(*args, **kwargs)
            for group in groups:
                for completion in group:
                    completion.logprobs.add_(0.01)
            return groups

    budget = KLBudget(start=0.05, end=0.05, mismatch_subtraction=subtraction)
    module = policy(engine=Shifted(), group_size=8)
    record = run(tmp_path, budget, module, steps=1, callbacks=[WeightSync()])
    assert record["kl/budget"] == pytest.approx([left], rel=1e-3)
    assert budget.state_dict()["mismatch"] == pytest.approx(0.01, rel=1e-3)


# Around it.


def test_a_resumed_run_goes_on_in_the_middle_of_the_schedule(tmp_path: Path) -> None:
    def train(steps: int, name: str, ckpt_path: Path | None = None) -> tuple[Any, Record]:
        saving = ModelCheckpoint(tmp_path / name, save_last=True, every_n_train_steps=1)
        module = policy(group_size=8)
        budget = KLBudget(1e-3, 1e-4, steps=6, mismatch_subtraction=True)
        options = {"callbacks": [saving], "enable_checkpointing": True, "ckpt_path": ckpt_path}
        return weights(module), run(tmp_path, budget, module, steps, **options)

    _, straight = train(6, "straight")
    _, first = train(3, "half")
    _, second = train(6, "half", tmp_path / "half" / "last.ckpt")
    for name in ("kl/budget", "kl/predicted", "kl/measured", "optim/step_scale"):
        assert first[name] + second[name] == straight[name], name


def test_steps_that_change_nothing_do_not_use_up_the_schedule_also_through_a_resume(
    tmp_path: Path,
) -> None:
    """Two steps per batch: the third batch has no signal, and one step of the first is skipped."""

    def train(steps: int, name: str, ckpt_path: Path | None = None) -> list[Any]:
        def no_signal_in_the_third(completion: str) -> float:
            return 1.0 if module.global_step in (4, 5) else digits(completion)

        module = policy(
            rewards=[Reward(no_signal_in_the_third)], group_size=8, minibatches=2, inner_epochs=1
        )
        budget = EveryStep(1e-3, 1e-4, steps=6, schedule="linear")
        saving = ModelCheckpoint(tmp_path / name, save_last=True, every_n_train_steps=2)
        options = {"callbacks": [PoisonStep(1), saving], "enable_checkpointing": True}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "step 1: the gradient is not finite")
            run(tmp_path, budget, module, steps, ckpt_path=ckpt_path, **options)
        return budget.seen

    schedule = Schedule(1e-3, 1e-4, 6, "linear")
    expected = [schedule(updates) for updates in (0, 1, 1, 2, 3, 3, 3, 4)]
    assert [seen[0] for seen in train(8, "straight")] == expected
    first = train(4, "half")
    second = train(8, "half", tmp_path / "half" / "last.ckpt")
    assert [seen[0] for seen in first + second] == expected


def test_the_chart_shows_budget_predicted_and_measured_together(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    run(tmp_path, KLBudget(), logger=logger, steps=1)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if "custom_scalars" in tag]
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors(tag)[0].tensor_proto.string_val[0])
    (chart,) = layout.category[0].chart
    assert list(chart.multiline.tag) == ["kl/budget", "kl/predicted", "kl/measured"]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_what_bf16_shows_of_a_small_update_is_logged_apart_and_is_mostly_rounding(
    tmp_path: Path, precision: str
) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    budget = KLBudget(1e-8, 1e-8, bf16_every=2)
    record = run(tmp_path, budget, precision=precision, steps=4, logger=logger)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Scalars("kl/measured_bf16")
    assert [event.step for event in shown] == [1, 3]
    assert all(not 0.5 < event.value / 1e-8 < 2 for event in shown)
    assert record["kl/ratio"] == pytest.approx([1.0] * 4, abs=0.1)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_in_bf16_the_kl_is_that_of_the_fp32_oracle(tmp_path: Path, precision: str) -> None:
    found = {}
    for method in ("forward_ad", "fp32"):
        budget = KLBudget(1e-4, 1e-4, method=method, probe_rollouts=64, max_scale=100, bf16_every=0)
        record = run(tmp_path, budget, policy(group_size=8), steps=1, precision=precision)
        found[method] = record["optim/step_scale"] + record["kl/measured"]
    assert found["forward_ad"] == pytest.approx(found["fp32"], rel=0.05)


def test_without_row_adam_it_is_inactive_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        record = run(tmp_path, KLBudget(), strategy="auto")
    told = [r for r in caplog.records if "KLBudget is inactive: DenseAdamW" in r.getMessage()]
    assert len(told) == 1
    assert "kl/budget" not in record.steps[-1]


def test_it_stands_before_weight_sync(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, callbacks=[SketchAccumulation(), WeightSync(), KLBudget()])
    with pytest.raises(ValueError, match="put KLBudget before WeightSync"):
        fitted.fit(policy(), datamodule=data(tmp_path))


def test_a_module_without_a_probe_is_told_what_it_needs(pair: nn.Module) -> None:
    fake = SimpleNamespace(optimizers=[RowAdam.__new__(RowAdam)], loggers=[])
    with pytest.raises(ValueError, match=r"needs LightningModule to have `kl_probe"):
        KLBudget().on_train_start(fake, LightningModule())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"start": 0.0},
        {"end": math.nan},
        {"steps": 0},
        {"schedule": "step"},
        {"method": "jvp"},
        {"max_scale": 0.0},
        {"tolerance": 0.5},
        {"mismatch_weight": 0.0},
        {"probe_rollouts": 0},
        {"probe_max_tokens": 0},
        {"max_backtracks": -1},
        {"bf16_every": -1},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kl_budget"):
        KLBudget(**options)
