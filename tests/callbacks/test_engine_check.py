"""EngineCheck finds weights, names and temperatures that do not fit before they train anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from logra_lightning import SamplingParams, SketchAccumulation
from logra_lightning.callbacks import EngineCheck, WeightSync
from logra_lightning.engines import Engine, PolicyWeight
from logra_lightning.sketch import Factors
from logra_lightning.types import Completion
from tests.copy_engine import CopyEngine
from tests.runs import data, policy, trainer

pytestmark = pytest.mark.usefixtures("private_datasets_cache")

LOGGER = "lightning.pytorch.utilities.rank_zero"


def run(
    tmp_path: Path, engine: Engine | None, check: EngineCheck, steps: int = 3, **options: Any
) -> Trainer:
    module = policy(**({"engine": engine} if engine else {}), **options.pop("module", {}))
    callbacks: list[Callback] = [SketchAccumulation(), WeightSync(), check]
    fitted = trainer(tmp_path, steps=steps, callbacks=callbacks, **options)
    fitted.fit(module, datamodule=data(tmp_path))
    return fitted


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith("EngineCheck")]


@pytest.mark.parametrize("own", [True, False])
def test_it_checks_before_the_first_step_and_after_the_first_sync(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    with caplog.at_level("INFO", logger=LOGGER):
        run(tmp_path, CopyEngine() if own else None, EngineCheck(max_tokens=4))
    assert [re.findall(r"step (\d)", message) for message in told(caplog)] == [["0"], ["1"]]
    found = re.search(r"absolute difference (\S+), largest", told(caplog)[1])
    assert found
    assert float(found.group(1)) < 1e-5


def test_it_checks_regularly_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=LOGGER):
        run(tmp_path, None, EngineCheck(every_n_steps=2), steps=5)
    assert [re.findall(r"step (\d)", m)[0] for m in told(caplog)] == ["0", "1", "2", "4"]


def test_bf16_has_a_wider_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=LOGGER):
        run(tmp_path, CopyEngine(), EngineCheck(), precision="bf16-true")
        run(tmp_path, None, EngineCheck(), precision="bf16-mixed")
    assert len(told(caplog)) == 4
    assert all("bound 1e-01" in message for message in told(caplog))


def test_an_engine_that_returns_no_logprobs_is_told_that_it_must(tmp_path: Path) -> None:
    class Silent(CopyEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            groups = super().generate(*args, **kwargs)
            for group in groups:
                for completion in group:
                    completion.logprobs.fill_(torch.nan)
            return groups

    with pytest.raises(RuntimeError, match=r"Silent returned no finite logprob for any of \d+ tok"):
        run(tmp_path, Silent(), EngineCheck())


class OtherWeights(CopyEngine):
    """A weight never arrives, as with a name that is skipped."""

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        super().load([w for w in weights if "1.mlp.up_proj" not in w.name], version=version)

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        super().start(policy, stop_token_ids)
        with torch.no_grad():
            self.copy.get_parameter("model.layers.1.mlp.up_proj.weight").add_(0.05)


class LostUpdate(CopyEngine):
    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        self.policy_version = updates[-1].version + 1


class RawLogprobs(CopyEngine):
    """Logprobs at temperature 1, whatever the temperature."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        prompts, sampling = args
        return super().generate(prompts, replace(sampling, temperature=1.0), **kwargs)


@pytest.mark.parametrize(("engine", "step"), [(OtherWeights, 0), (LostUpdate, 1), (RawLogprobs, 0)])
def test_it_refuses_to_train_and_prints_both(
    tmp_path: Path, engine: type[CopyEngine], step: int
) -> None:
    options = {"sampling": SamplingParams(max_tokens=6, temperature=0.7)}
    message = (
        rf"do not agree on the same tokens, step {step}, \d+ tokens at temperature 0.7: mean "
        rf"logprob -\d.\d+ in {engine.__name__}, -\d.\d+ in the trainer; mean absolute "
        rf"difference \d.*"
        rf"at most 1e-04 is allowed"
    )
    with pytest.raises(RuntimeError, match=message):
        run(tmp_path, engine(), EngineCheck(), module=options)


def test_the_second_check_waits_for_a_step_that_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reject(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 0:
                optimizer.propose().reject()

    with caplog.at_level("INFO", logger=LOGGER):
        module = policy(engine=CopyEngine())
        callbacks: list[Callback] = [SketchAccumulation(), Reject(), WeightSync(), EngineCheck()]
        fitted = trainer(tmp_path, steps=4, callbacks=callbacks)
        fitted.fit(module, datamodule=data(tmp_path))
    assert [re.findall(r"step (\d)", m)[0] for m in told(caplog)] == ["0", "2"]


def test_a_module_without_what_it_needs_is_told() -> None:
    with pytest.raises(ValueError, match="EngineCheck needs LightningModule to have 'policy'"):
        EngineCheck().on_train_start(Trainer(logger=False), LightningModule())


def test_the_bound_can_be_set(tmp_path: Path) -> None:
    run(tmp_path, LostUpdate(), EngineCheck(tolerance=10.0))


@pytest.mark.parametrize(
    "options", [{"num_prompts": 0}, {"max_tokens": 0}, {"every_n_steps": -1}, {"tolerance": 0.0}]
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="engine_check"):
        EngineCheck(**options)
