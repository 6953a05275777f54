"""Hybrids in whole runs: gradients, KL, resume and export are as for any other model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from transformers import AutoModelForCausalLM, AutoTokenizer

from logra_lightning import KLBudget, PolicyModule, PromptDataModule, SketchAccumulation
from logra_lightning.callbacks import EngineCheck, WeightSync
from logra_lightning.engines import Engine, VLLMEngine
from logra_lightning.policy.export import export_checkpoint
from tests.conftest import TINY_POLICY, write_sums
from tests.hybrids import HYBRIDS, WIDE, make_hybrid
from tests.runs import policy, trainer, weights

pytestmark = [
    pytest.mark.usefixtures("private_datasets_cache"),
    pytest.mark.filterwarnings("ignore:.*cut off at model.sampling.max_tokens"),
]
FAMILIES = [
    pytest.param(name, marks=[] if name == "Qwen3_5TextConfig" else [pytest.mark.slow])
    for name in HYBRIDS
]


class Logged(Callback):
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values = {name: float(value) for name, value in trainer.callback_metrics.items()}


def save(folder: Path, family: str, **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    make_hybrid(family, vocab_size=len(tokenizer), **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp(request.param), request.param)


def fit(
    where: Path,
    folder: str,
    steps: int,
    *,
    ckpt_path: Path | None = None,
    engine: Engine | None = None,
    more: Sequence[Callback] = (),
    **options: Any,
) -> tuple[PolicyModule, dict[str, float], Any]:
    logged = Logged()
    budget = KLBudget(1e-3, 1e-3, **{"probe_rollouts": 64} | options.pop("budget", {}))
    callbacks = [SketchAccumulation(), budget, *more, logged]
    run = trainer(where, steps, callbacks=callbacks, **options)
    module = policy(model=folder, group_size=4, **({"engine": engine} if engine else {}))
    path = write_sums(where / "sums.jsonl", 24)
    data = PromptDataModule(path, folder, prompts_per_step=4)
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, logged.values, run


def test_in_bf16_the_kl_is_that_of_the_fp32_oracle(folder: str, tmp_path: Path) -> None:
    found = {}
    for method in ("forward_ad", "fp32"):
        budget = {"method": method, "max_scale": 1e3, "bf16_every": 0}
        _, values, _ = fit(tmp_path, folder, 1, precision="bf16-true", budget=budget)
        found[method] = [values["optim/step_scale"], values["kl/measured"]]
    assert found["forward_ad"] == pytest.approx(found["fp32"], rel=0.08)


def test_a_run_resumes_bit_for_bit_and_exports(folder: str, tmp_path: Path) -> None:
    straight, values, run = fit(tmp_path, folder, 4, precision="bf16-true")
    assert values["kl/measured"] > 0
    half, _, stopped = fit(tmp_path, folder, 2, precision="bf16-true")
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _, _ = fit(
        tmp_path, folder, 4, precision="bf16-true", ckpt_path=tmp_path / "half.ckpt"
    )
    expected, changed = weights(straight), weights(half)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name
    (name, *_) = (name for name in expected if name.endswith("up_proj.weight"))
    assert not torch.equal(expected[name], changed[name])
    run.save_checkpoint(tmp_path / "end.ckpt")
    export_checkpoint(str(tmp_path / "end.ckpt"), str(tmp_path / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, value in exported.items():
        assert torch.equal(value, expected[f"policy.{name}"]), name


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["factors", "shared"])
def test_vllm_agrees_with_the_policy_before_and_after_updates(
    tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    folder = save(tmp_path / "model", "Qwen3_5TextConfig", **WIDE)
    engine = VLLMEngine(kv_cache_memory_bytes=1 << 24, engine_args={"max_num_seqs": 16})
    check = EngineCheck(every_n_steps=1)
    more = [WeightSync(mode=mode), check]
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, folder, 3, precision="bf16-true", engine=engine, more=more)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("EngineCheck")]
    assert len(told) == 3  # before each step
    assert all(float(re.search(r"absolute difference (\S+),", t)[1]) < 0.02 for t in told)
