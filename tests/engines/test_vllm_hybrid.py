"""Hybrids in vLLM: Gated DeltaNet follows the trainer bit for bit, Falcon-H1 is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from logra_lightning.engines import VLLMEngine
from tests.hybrids import WIDE, make_hybrid
from tests.tiny_vllm import Trainer, errors, make_engine

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.mark.slow
def test_what_vllm_holds_in_another_form_is_refused() -> None:
    # Before the others: while their engine runs, no second one starts.
    engine = make_engine()
    with pytest.raises(ValueError, match=r"one by one.*mamba\.mamba.*TorchEngine"):
        engine.start(make_hybrid("FalconH1Config").to(torch.bfloat16), [1])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[VLLMEngine, Trainer]]:
    trainer = Trainer(make_hybrid("Qwen3_5TextConfig", **WIDE).to(torch.bfloat16))
    engine = make_engine(engine_args={"block_size": None})
    engine.start(trainer.policy, [1])
    engine.load(trainer.weights(), version=0)
    yield engine, trainer
    engine.close()


def test_engine_and_trainer_agree(served: tuple[VLLMEngine, Trainer]) -> None:
    engine, trainer = served
    assert errors(engine, trainer.policy).mean() < 0.02
    leaves = {name.rsplit(".", 1)[-1] for name in trainer.targets}
    assert {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"} <= leaves


def test_bits_are_equal_after_300_factor_syncs(served: tuple[VLLMEngine, Trainer]) -> None:
    engine, trainer = served
    for _ in range(30):
        engine.merge([trainer.step(1e-3) for _ in range(10)])
    assert engine.policy_version == 300
    assert engine.differing(trainer.weights()) == []
    assert errors(engine, trainer.policy).mean() < 0.02
