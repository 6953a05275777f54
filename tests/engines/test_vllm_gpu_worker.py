"""The worker of a GPU engine uses the trainer's GPU; vLLM's own worker is a stand-in here."""

from __future__ import annotations

from typing import Any

import pytest

from logra_lightning.engines.vllm_launch import FIRST_GPU

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("first", "local_rank", "expected"), [(None, 0, 0), ("3", 0, 3), ("2", 1, 3)]
)
def test_gpus_are_counted_from_the_trainers(
    monkeypatch: pytest.MonkeyPatch, first: str | None, local_rank: int, expected: int
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from logra_lightning.engines.vllm_gpu_worker import TrainersGPUWorker

    used: list[Any] = []
    monkeypatch.setattr(Worker, "init_device", lambda self: used.append(self.local_rank))
    monkeypatch.delenv(FIRST_GPU, raising=False)
    if first is not None:
        monkeypatch.setenv(FIRST_GPU, first)
    worker = object.__new__(TrainersGPUWorker)
    worker.local_rank = local_rank
    worker.init_device()
    assert used == [expected]
