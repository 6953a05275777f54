"""The order of calls around sleep, on a stand-in for vLLM: it needs a GPU to really sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.engines.vllm_weights import VLLMWeights
from logra_lightning.sketch import Factors
from logra_lightning.types import SamplingParams


class FakeLLM:
    """Records calls; `logra_call` answers as a worker with one weight would."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.llm_engine = self.engine_core = self.scheduler = self
        self.finished = False  # which the scheduler forgets when it is stepped
        self.batch_queue: list[str] = []

    def has_requests(self) -> bool:
        return self.finished

    def step(self) -> None:
        self.calls.append("step")
        if self.batch_queue:
            self.batch_queue.pop()
        if self.finished:
            self.finished = False
            self.batch_queue.append("empty")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release kv")

    def wake_up(self, tags: list[str]) -> None:
        self.calls += [f"wake {tag}" for tag in tags]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset cache")
        return True

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(args[0] if method == "logra_call" else method)
        return [{"w": [2, 2]} if args[:1] == ("shapes",) else None]

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls.append("generate")
        return []


WEIGHT = PolicyWeight("w", torch.ones(2, 2), None, "w")


def asleep(mode: Any, batches: int = 1) -> tuple[VLLMEngine, FakeLLM]:
    engine, llm = VLLMEngine(sleep=mode), FakeLLM()
    llm.finished, llm.batch_queue = True, ["batch"] * batches
    engine._llm = llm
    engine._weights = VLLMWeights(llm, torch.float32, in_process=True)
    engine.load([WEIGHT], version=0)
    llm.calls.clear()
    engine.sleep()
    engine.sleep()  # a second time changes nothing
    return engine, llm


def generate(engine: VLLMEngine) -> None:
    pytest.importorskip("vllm")
    engine.generate([[1]], SamplingParams(4), num_completions=1, seed=0)


def factors() -> Factors:
    return Factors(0, 0, 0, "rademacher", 1.0, {"w": torch.ones(2, 1, dtype=torch.bfloat16)})


def test_none_never_sleeps() -> None:
    _, llm = asleep("none")
    assert llm.calls == []


def test_kv_is_released_and_woken_after_the_sync() -> None:
    engine, llm = asleep("kv")
    assert llm.calls == ["step", "step", "sleep 0", "release kv"]
    engine.merge([factors()])
    assert llm.calls[4:] == ["merge", "reset cache"]
    generate(engine)
    assert llm.calls[6:] == ["wake kv_cache", "logra_seed", "generate"]


def test_batches_that_were_prepared_ahead_are_taken_back_before_the_cache() -> None:
    _, llm = asleep("kv", batches=2)
    assert llm.calls == ["step", "step", "step", "sleep 0", "release kv"]


def test_an_engine_that_never_comes_to_rest_is_told() -> None:
    engine, llm = VLLMEngine(sleep="kv"), FakeLLM()
    engine._llm = llm
    llm.step = lambda: None  # type: ignore[method-assign]
    llm.finished = True
    with pytest.raises(RuntimeError, match="still holds requests"):
        engine.sleep()


def test_weights_are_woken_then_sent_then_the_cache_is_woken() -> None:
    engine, llm = asleep("weights")
    assert llm.calls == ["sleep 2"]
    engine.load([WEIGHT], version=1)
    assert llm.calls[1:] == ["wake weights", "load", "reset cache"]
    generate(engine)
    assert llm.calls[4:] == ["wake kv_cache", "logra_seed", "generate"]


def test_weights_that_were_given_back_are_never_sampled_from_or_merged_into() -> None:
    engine, llm = asleep("weights")
    with pytest.raises(ValueError, match="given back in sleep"):
        engine.merge([factors()])
    with pytest.raises(RuntimeError, match="given back in its sleep and not sent again"):
        engine.generate([[1]], SamplingParams(4), num_completions=1, seed=0)
    assert llm.calls == ["sleep 2"]


def test_shared_weights_are_the_policys_own_again_before_vllm_drops_its_memory() -> None:
    engine, llm = asleep("kv")
    policy, memory = nn.Linear(2, 2, bias=False), torch.full((2, 2), 5.0)
    policy.weight.data = memory
    weights = engine._started()
    weights._shared.append(("w", policy.weight, memory))
    llm.calls.clear()
    weights.release()
    assert llm.calls == ["logra_release"]
    memory.zero_()
    assert policy.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]
    weights.check_shared()  # there is nothing left to check
