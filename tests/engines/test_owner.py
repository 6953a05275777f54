"""An engine is started once, refused when it is old, and closed whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from transformers import LlamaForCausalLM

from logra_lightning.engines import TorchEngine, VLLMEngine
from logra_lightning.engines.owner import CloseEngine, EngineOwner, default_engine
from tests.quiet_engine import QuietEngine


class Recorded(QuietEngine):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        self.calls.append(list(stop_token_ids))

    def close(self) -> None:
        self.calls.append("close")


class Tokenizer:
    eos_token_id = 7


def test_it_starts_once_with_the_stop_tokens_and_again_after_it_was_closed(
    llama: LlamaForCausalLM,
) -> None:
    llama.generation_config.eos_token_id = [9]
    owner = EngineOwner(Recorded())  # type: ignore[arg-type]
    for _ in range(2):
        assert owner.ready(llama, Tokenizer()) is owner.engine
    owner.close()
    owner.ready(llama, Tokenizer())
    assert owner.engine.calls == [[7, 9], "close", [7, 9]]  # type: ignore[attr-defined]


def test_an_engine_with_older_weights_is_refused() -> None:
    engine = Recorded()
    owner = EngineOwner(engine)  # type: ignore[arg-type]
    owner.check_version(3)  # it samples from the very weights that train
    engine.policy_version = 3  # type: ignore[assignment]
    owner.check_version(3)
    with pytest.raises(RuntimeError, match="policy version 3, but 4 steps .* add the WeightSync"):
        owner.check_version(4)


def test_a_run_that_fails_closes_it() -> None:
    owner = EngineOwner(Recorded())  # type: ignore[arg-type]
    CloseEngine(owner).on_exception(None, LightningModule(), KeyboardInterrupt())  # type: ignore[arg-type]
    assert owner.engine.calls == ["close"]  # type: ignore[attr-defined]


def test_vllm_samples_where_it_is_installed_and_its_absence_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert isinstance(default_engine(), VLLMEngine)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        assert isinstance(EngineOwner(None).engine, TorchEngine)
    assert "vLLM is not installed: TorchEngine samples" in caplog.text


def test_an_engine_is_told_what_the_run_needs() -> None:
    engine = VLLMEngine()
    owner = EngineOwner(engine)
    policy = SimpleNamespace(dtype=torch.float32)
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        owner.expect(40, precision)
        assert engine._choose_dtype(policy) == dtype
    engine.dtype = "float32"
    assert engine._choose_dtype(policy) == torch.float32
    EngineOwner(TorchEngine()).expect(40, "32-true")  # it samples as the policy computes
