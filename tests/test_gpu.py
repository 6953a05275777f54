"""What only a GPU can show: `make test-gpu`; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from logra_lightning import SketchAccumulation, TorchEngine, VLLMEngine, WeightSync
from logra_lightning.callbacks import EngineCheck
from logra_lightning.engines.weights import checksum
from logra_lightning.sketch import merge_
from logra_lightning.sketch.master import join, split
from tests.runs import data, policy, trainer, weights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("private_datasets_cache")]


def fit(folder: Path, engine: Any, steps: int = 2, **options: Any) -> dict[str, torch.Tensor]:
    module = policy(engine=engine)
    run = trainer(folder, steps, accelerator="gpu", **options)
    run.fit(module, datamodule=data(folder))
    return weights(module)


def test_masters_are_split_and_joined_with_the_bits_of_the_cpu() -> None:
    master = torch.randn(129, 65)
    for own, theirs in zip(split(master), split(master.cuda()), strict=True):
        assert torch.equal(own, theirs.cpu())
    high, low = split(master.cuda())
    assert torch.equal(join(high, low).cpu(), master)
    assert checksum(high, low) == checksum(master)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_blocks_are_merged_with_the_bits_of_the_whole(precision: str) -> None:
    whole = torch.randn(256, 320, device="cuda")
    direction = torch.randn(256, 16, device="cuda").to(torch.bfloat16)
    entries = torch.randint(0, 2, (16, 320), device="cuda").mul(2).sub(1).to(torch.float32)
    parts = whole.clone()
    torch.set_float32_matmul_precision(precision)
    try:
        merge_(whole, direction, entries, decay=0.999)
        for row in (0, 128):
            block = parts[row : row + 128]
            merge_(
                block,
                direction[row : row + 128],
                entries,
                decay=0.999,
                origin=(row, 0),
                shape=(256, 320),
            )
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_run_trains(tmp_path: Path, precision: str) -> None:
    once, longer = (fit(tmp_path, TorchEngine(), steps, precision=precision) for steps in (1, 3))
    assert any(not torch.equal(once[name], value) for name, value in longer.items())
    assert all(value.isfinite().all() for value in longer.values())


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["factors", "dense", "shared"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_vllm_follows_the_policy_bit_for_bit(tmp_path: Path, precision: str, mode: str) -> None:
    pytest.importorskip("vllm")
    # Both raise where engine and trainer differ.
    checks = [WeightSync(mode=mode, verify_every=1), EngineCheck(every_n_steps=1)]
    callbacks = [SketchAccumulation(), *checks]
    engine = VLLMEngine(kv_cache_memory_bytes=1 << 28)
    fit(tmp_path, engine, 3, precision=precision, callbacks=callbacks)


@pytest.mark.vllm
@pytest.mark.parametrize("sleep", ["kv", "weights"])
def test_an_engine_sleeps_and_wakes(tmp_path: Path, sleep: Any) -> None:
    pytest.importorskip("vllm")
    callbacks = [SketchAccumulation(), WeightSync(verify_every=1), EngineCheck(every_n_steps=1)]
    engine = VLLMEngine(kv_cache_memory_bytes=1 << 28, sleep=sleep)
    fit(tmp_path, engine, 3, callbacks=callbacks)
