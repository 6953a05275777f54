"""Tokens are counted over steps, processes and resumes, against a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from logra_lightning.callbacks import Throughput, throughput
from logra_lightning.types import Completion, Rollouts
from tests.two_processes import TwoProcesses


class Fake(LightningModule):
    """At each step prompts of 3 and 5 tokens with completions of 2 and 10."""

    def __init__(self, rollout_s: float | None = 0.5) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(1))
        self.rollouts: Rollouts | None = None
        self.rollout_s = rollout_s

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.rollouts = Rollouts(
            prompt_ids=[[1] * 3, [1] * 5],
            completions=[Completion([1] * n, torch.zeros(n), False) for n in (2, 10)],
            rewards=torch.zeros(2),
            rewards_by_name={},
            advantages=torch.zeros(2),
        )
        if self.rollout_s is not None:
            self.log("time/rollout_s", self.rollout_s)
        self.optimizers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(1))  # type: ignore[arg-type]


class Record(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics.items()
        self.steps.append({k: float(v) for k, v in metrics if k.startswith("throughput/")})


def fit(
    tmp_path: Path, module: Fake, steps: int, ckpt_path: Path | None = None, **options: Any
) -> list[dict[str, float]]:
    record = Record()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=1)
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    trainer = Trainer(
        **(defaults | options),
        callbacks=[Throughput(), record, checkpoint],
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return record.steps


@pytest.fixture
def two_seconds_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read at the start and the end of each step, and goes on by two seconds."""
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(now)))


@pytest.mark.usefixtures("two_seconds_a_step")
def test_tokens_per_second_and_in_all(tmp_path: Path) -> None:
    first, second = fit(tmp_path, Fake(), 2)
    # 8 prompt and 12 completion tokens in 2 s, the 12 of them sampled in 0.5 s
    assert first == pytest.approx(
        {
            "throughput/tokens_per_s": 10.0,
            "throughput/completion_tokens_per_s": 24.0,
            "throughput/tokens_per_step": 20.0,
            "throughput/total_completion_tokens": 12.0,
        }
    )
    assert second == pytest.approx(first | {"throughput/total_completion_tokens": 24.0})


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    fit(tmp_path, Fake(), 3)
    (resumed,) = fit(tmp_path, Fake(), 4, ckpt_path=tmp_path / "last.ckpt")
    assert resumed["throughput/total_completion_tokens"] == 48.0


@pytest.mark.usefixtures("two_seconds_a_step")
def test_without_the_time_of_the_rollout_its_rate_is_left_out(tmp_path: Path) -> None:
    (step,) = fit(tmp_path, Fake(rollout_s=None), 1)
    assert "throughput/completion_tokens_per_s" not in step
    assert step["throughput/tokens_per_s"] == pytest.approx(10.0)


def test_a_module_without_rollouts_is_told_what_it_needs(tmp_path: Path) -> None:
    module = Fake()
    del module.rollouts
    with pytest.raises(ValueError, match="Throughput needs Fake to have `rollouts`"):
        fit(tmp_path, module, 1)


def count_in_both(folder: Path) -> dict[str, float]:
    process = torch.distributed.get_rank()
    now = iter(range(0, 1000, [1, 4][process]))  # steps of 1 s in process 0, of 4 s in process 1
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", clock)
        (step,) = fit(folder, Fake([0.5, 1.5][process]), 1, devices=2, strategy="ddp")
    return step


@pytest.mark.dist
def test_processes_are_summed_and_the_slowest_sets_the_time(
    two_processes: TwoProcesses, tmp_path: Path
) -> None:
    expected = {
        "throughput/tokens_per_step": 40,
        "throughput/tokens_per_s": 10,
        "throughput/completion_tokens_per_s": 16,
        "throughput/total_completion_tokens": 24,
    }
    assert two_processes.run(count_in_both, tmp_path) == [expected, expected]
