"""What vLLM says when it does not start becomes one line with the option to change."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.engines.vllm_refusals import one_line_refusals

OPTIONS = {"gpu_memory_utilization": 0.3}


def refused(text: str) -> str:
    with pytest.raises(ValueError, match="vLLM") as error, one_line_refusals("NewLM", OPTIONS):
        raise ValueError(text)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_architecture_that_it_does_not_serve_is_named() -> None:
    text = (
        "1 validation error for ModelConfig\n  Value error, Model architectures ['NewLM'] failed "
        "to be inspected. Please check the logs for more details. [type=value_error]"
    )
    said = refused(text)
    assert said.startswith("vLLM does not serve NewLM here (Value error, Model architectures")
    assert said.endswith("set model.engine to logra_lightning.engines.TorchEngine")


def test_too_little_free_memory_is_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 18 << 30)
    said = refused("Free memory on device cuda:0 (5.0/24.0 GiB) on startup is less than desired")
    assert "wants 0.3 of the GPU, 7.2 GiB, but 5.0 of 24.0 GiB are free" in said
    assert "the trainer holds 18.0" in said
    assert "lower model.engine.init_args.gpu_memory_utilization" in said


def test_too_small_a_cache_is_told_with_what_makes_room() -> None:
    said = refused("To serve at least one request, 9.0 GiB KV cache is needed, which is larger ...")
    assert "lower model.engine.init_args.max_model_len" in said


def test_all_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), one_line_refusals("A", OPTIONS):
        raise RuntimeError("something else")
