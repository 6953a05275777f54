"""Engines of two processes, one each or one that they share: exact weights, exact when resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from logra_lightning import KLBudget, SketchAccumulation, TorchEngine, VLLMEngine, WeightSync
from logra_lightning.callbacks import EngineCheck
from logra_lightning.distributed.processes import (
    num_processes,
    of_all_processes,
    process_index,
    sum_over_processes_,
)
from logra_lightning.engines.vllm_group import EngineGroup
from logra_lightning.types import SamplingParams
from tests.conftest import ROOT
from tests.engines.test_vllm_engine import PROMPTS, Trainer, errors, make_engine, make_policy
from tests.heap import import_vllm
from tests.runs import data, policy, trainer, weights
from tests.split_runs import STRATEGIES, own_folder
from tests.two_processes import TwoProcesses

pytestmark = [pytest.mark.dist, pytest.mark.vllm]
pytest.importorskip("vllm")


@pytest.fixture(scope="module", autouse=True)
def vllm_in_both(two_processes: TwoProcesses) -> None:
    two_processes.run(import_vllm)


class Save(Callback):
    """Saves a checkpoint after the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def resume_exactly(folder: Path, strategy: str, precision: str, size: int) -> None:
    """In both processes, which share an engine where `size` is 2."""

    def fit(**options: Any) -> Any:
        engine = VLLMEngine(
            tensor_parallel_size=size, kv_cache_memory_bytes=16 << 20, max_model_len=64
        )
        module = policy(engine=engine)
        # Both raise where engine and trainer differ.
        checks = [WeightSync(verify_every=1), EngineCheck(every_n_steps=1)]
        made = trainer(
            own_folder(folder),
            4,
            devices=2,
            strategy=STRATEGIES[strategy](rank=32),
            precision=precision,
            callbacks=[SketchAccumulation(), KLBudget(), *checks, Save(folder / "half.ckpt")],
        )
        made.fit(module, datamodule=data(own_folder(folder)), **options)
        return module

    straight = fit()
    resumed = fit(ckpt_path=folder / "half.ckpt")
    other = weights(resumed)
    for name, value in weights(straight).items():
        assert torch.equal(value, other[name]), name
    assert len(straight.rollouts) == 8  # each process trains on its own prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "size"),
    [
        ("sketch_fsdp", "bf16-true", 1),
        ("sketch_fsdp", "32-true", 1),
        ("sketch_ddp", "bf16-true", 1),
        ("sketch_ddp", "32-true", 1),
        ("sketch_fsdp", "bf16-true", 2),
        ("sketch_ddp", "32-true", 2),
    ],
)
def test_resuming_is_exact_with_an_engine_each_or_shared(
    two_processes: TwoProcesses, tmp_path: Path, strategy: str, precision: str, size: int
) -> None:
    two_processes.run(resume_exactly, tmp_path, strategy, precision, size)


def share_an_engine() -> None:
    """Greedy completions of unequal shares are those of the policy itself."""
    process, llama, plain = process_index(), make_policy(), TorchEngine()
    plain.start(llama, [2])
    prompts = [[[5, 6, 7], [8, 9]], [[8, 9, 10]]][process]
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    engine = make_engine(tensor_parallel_size=2)
    engine.start(llama, [2])
    for asked in (prompts, prompts if process else []):
        expected = plain.generate(asked, greedy, num_completions=1, seed=0)
        found = engine.generate(asked, greedy, num_completions=1, seed=process)
        assert [[c.token_ids for c in group] for group in found] == [
            [c.token_ids for c in group] for group in expected
        ]
    engine.close()


def test_both_may_sample_with_one_engine(two_processes: TwoProcesses) -> None:
    two_processes.run(share_an_engine)


def use_an_engine_each() -> None:
    process = process_index()
    mine, engine = Trainer(make_policy()), make_engine()

    def total() -> float:
        return sum_over_processes_(torch.tensor([process + 1.0])).item()

    engine.start(mine.policy, [1])
    engine.load(mine.weights(), version=mine.version)
    engine.merge([mine.step(), mine.step()])
    assert engine.differing(mine.weights()) == []
    assert errors(engine, mine.policy, seed=process).max() < 1e-4
    prompts = [[*PROMPTS[0], 11 + process]]
    group = engine.generate(prompts, SamplingParams(8), num_completions=4, seed=process)[0]
    first, second = of_all_processes([c.token_ids for c in group])
    assert first != second
    assert total() == 3.0
    engine.close()
    assert num_processes() == 2
    assert total() == 3.0


def test_the_trainers_process_group_comes_before_the_engines_and_outlives_them(
    two_processes: TwoProcesses,
) -> None:
    two_processes.run(use_an_engine_each)


def test_processes_that_cannot_share_are_refused() -> None:
    with pytest.raises(
        ValueError, match="1 processes cannot share engines of 2 processes each: set model.engine"
    ):
        EngineGroup(2)


@pytest.mark.slow
def test_a_group_without_prompts_does_not_keep_the_others_waiting() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.four_processes"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("is done") == 4
