"""A run says what it runs on, and what makes it slow without need."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from logra_lightning import TorchEngine
from logra_lightning.start_line import has_native_bf16, slow_without_need, what_runs
from tests.hybrids import make_hybrid

CPU = torch.device("cpu")


def test_device_precision_attention_and_engine_are_named(llama: LlamaForCausalLM) -> None:
    said = what_runs(llama, TorchEngine(), CPU, "32-true")
    assert said.startswith("runs: cpu (")
    assert said.endswith(" threads), 32-true, attention sdpa, engine TorchEngine")


def test_the_form_of_layers_with_a_state_is_named() -> None:
    said = what_runs(make_hybrid("Qwen3_5TextConfig"), TorchEngine(), CPU, "32-true")
    assert "layers with a state by plain torch" in said


@pytest.mark.parametrize(("native", "lines"), [(False, 1), (True, 0)])
def test_bf16_in_software_is_told(
    monkeypatch: pytest.MonkeyPatch, native: bool, lines: int
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    known = {"avx2": True, "avx512_bf16": native, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert has_native_bf16() is native
    assert list(slow_without_need(CPU, "32-true")) == []
    told = list(slow_without_need(CPU, "bf16-mixed"))
    assert len(told) == lines
    assert all("trainer.precision=32-true in place of bf16-mixed" in line for line in told)


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = slow_without_need(CPU, "32-true")
    assert torch.__version__ in line
    assert "this run trains on the CPU" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(slow_without_need(CPU, "32-true")) == []
