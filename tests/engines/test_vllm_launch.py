"""What VLLMEngine sets itself cannot be set by users; test_vllm_engine launches vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from logra_lightning.engines import VLLMEngine, vllm_launch
from logra_lightning.engines.vllm_group import EngineGroup
from logra_lightning.engines.vllm_launch import (
    FIRST_GPU,
    check_engine_args,
    config_folder,
    launch,
)
from tests.conftest import SIZES, make_llama


@pytest.mark.parametrize(
    ("engine_args", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"tokenizer": "x", "seed": 1, "max_num_seqs": 4}, "seed, tokenizer"),
        ({"load_format": "auto"}, "load_format"),
        ({"worker_extension_cls": "x"}, "worker_extension_cls"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
    ids=str,
)
def test_what_it_sets_itself_is_refused(engine_args: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"engine_args sets {named}, which VLLMEngine sets"):
        check_engine_args(engine_args)


def test_everything_else_is_left_to_vllm() -> None:
    check_engine_args({"max_num_seqs": 4, "enable_chunked_prefill": False})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What vLLM would be started with, and the environment and settings that it would see."""
    found: list[dict[str, Any]] = []

    def make(folder: str, architecture: str, options: dict[str, Any], _: Any) -> object:
        autocast = torch.is_autocast_enabled("cpu")
        found.append({**os.environ, **options, "autocast": autocast, "folder": folder})
        return object()

    monkeypatch.setattr(vllm_launch, "_make", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    return found


def start(device: str, dtype: str = "bfloat16", group: EngineGroup | None = None) -> None:
    launch(LlamaConfig(**SIZES), "LlamaForCausalLM", {"dtype": dtype}, torch.device(device), group)


def test_the_engine_is_put_on_the_gpu_of_the_policy(started: list[dict[str, Any]]) -> None:
    start("cuda:3")
    start("cuda:2", group=EngineGroup(1))
    assert started[0][FIRST_GPU] == "3"
    assert started[1]["LOCAL_RANK"] == "2"
    assert FIRST_GPU not in started[1]
    assert not {FIRST_GPU, "LOCAL_RANK"} & set(os.environ)


def test_groups_are_independent_of_each_other(started: list[dict[str, Any]]) -> None:
    start("cpu", group=EngineGroup(1))
    assert started[0]["distributed_executor_backend"] == "external_launcher"
    assert "data_parallel_size" not in started[0]


def test_float32_on_a_gpu_stays_float32_in_kernels_that_are_compiled_later(
    started: list[dict[str, Any]],
) -> None:
    start("cuda:0")
    start("cpu", "float32")
    assert "TRITON_F32_DEFAULT" not in os.environ
    start("cuda:0", "float32")
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"  # monkeypatch takes it back


def test_autocast_does_not_reach_the_engine(started: list[dict[str, Any]]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        start("cpu")
    assert started[0]["autocast"] is False


def test_one_config_has_one_folder_and_another_config_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again = (config_folder(LlamaConfig(**SIZES)) for _ in range(2))
    other = config_folder(LlamaConfig(**SIZES, rope_theta=1e6))
    assert first == again
    assert other != first
    assert LlamaConfig.from_pretrained(first).hidden_size == SIZES["hidden_size"]
    assert sorted(path.name for path in Path(first).parent.iterdir()) == sorted(
        Path(folder).name for folder in (first, other)
    )


def test_without_a_cache_folder_a_temporary_one_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert LlamaConfig.from_pretrained(config_folder(LlamaConfig(**SIZES))).vocab_size == 61


def made_with(
    monkeypatch: pytest.MonkeyPatch, needed: int | None, **options: Any
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine with these options, in a run that needs so much."""

    class Started(Exception):
        pass

    def llm(folder: str, **options: Any) -> None:
        found.update(options)
        raise Started

    found: dict[str, Any] = {}
    monkeypatch.setattr("vllm.LLM", llm)
    engine = VLLMEngine(**options)
    engine.expect(longest=needed, dtype=None)
    with pytest.raises(Started):
        engine.start(make_llama(), [1])
    return found


@pytest.mark.vllm
def test_the_engine_reads_as_many_tokens_as_the_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    assert made_with(monkeypatch, 40)["max_model_len"] == 40
    assert made_with(monkeypatch, 40, max_model_len=64)["max_model_len"] == 64
    assert "max_model_len" not in made_with(monkeypatch, None)


@pytest.mark.vllm
def test_a_policy_where_this_vllm_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    monkeypatch.setattr("vllm.LLM", None)  # it is not reached
    other = "cuda" if current_platform.is_cpu() else "cpu"
    with pytest.raises(ValueError, match=f"the policy is on {other}, but .* set trainer.accel"):
        start(other)


@pytest.mark.vllm
def test_a_cache_of_a_given_size_needs_no_free_share_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    sized = made_with(monkeypatch, 40, kv_cache_memory_bytes=1 << 20)
    assert sized["gpu_memory_utilization"] <= 0.01
    assert made_with(monkeypatch, 40, gpu_memory_utilization=0.5)["gpu_memory_utilization"] == 0.5


@pytest.mark.vllm
def test_a_start_that_fails_leaves_the_garbage_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    calls: list[str] = []
    monkeypatch.setattr("gc.freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr("gc.unfreeze", lambda: calls.append("unfreeze"))
    made_with(monkeypatch, None)
    assert calls == ["freeze", "unfreeze"]
