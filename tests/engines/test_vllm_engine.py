"""VLLMEngine: the trainer's logprobs, a cache that is never stale, a process left as it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.engines.vllm_engine import _completion
from logra_lightning.types import SamplingParams
from tests.tiny_vllm import (
    LONG_PROMPT,
    PROMPTS,
    Trainer,
    errors,
    greedy,
    make_engine,
    make_policy,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


# What is sampled.


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_those_of_the_trainer(engine: VLLMEngine, temperature: float) -> None:
    policy = make_policy()
    engine.load(Trainer(policy).weights(), version=0)
    assert errors(engine, policy, temperature).max() < 1e-4


def test_the_trainers_autocast_does_not_reach_the_engine(engine: VLLMEngine) -> None:
    policy = make_policy()
    engine.load(Trainer(policy).weights(), version=0)
    plain = greedy(engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = greedy(engine)
    assert found.token_ids == plain.token_ids
    assert torch.equal(found.logprobs, plain.logprobs)


def test_a_token_for_which_vllm_has_no_logprob_has_none() -> None:
    from vllm.logprobs import FlatLogprobs

    found = FlatLogprobs([0, 1, 1], [1, 1, 2], [7, 9], [-0.5, -1.5], [1, 1], [None, None])
    output = SimpleNamespace(finish_reason="stop", token_ids=[7, 8, 9], logprobs=found)
    assert _completion(output).trained.tolist() == [True, False, True]
    assert _completion(output).logprobs[[0, 2]].tolist() == [-0.5, -1.5]
    output.logprobs = None
    assert _completion(output).trained.tolist() == [False] * 3


def test_a_completion_ends_with_a_stop_token_or_is_truncated(engine: VLLMEngine) -> None:
    engine.load(Trainer(make_policy()).weights(), version=0)
    groups = engine.generate(PROMPTS, SamplingParams(40), num_completions=16, seed=1)
    completions = [completion for group in groups for completion in group]
    assert [len(group) for group in groups] == [16, 16]
    assert {c.truncated for c in completions} == {True, False}
    for completion in completions:
        if completion.truncated:
            assert len(completion.token_ids) == 40
            assert 1 not in completion.token_ids
        else:
            assert completion.token_ids.index(1) == len(completion.token_ids) - 1


def test_the_same_seed_draws_the_same_and_groups_differ(engine: VLLMEngine) -> None:
    def draw(seed: int) -> list[list[int]]:
        groups = engine.generate(PROMPTS, SamplingParams(12), num_completions=4, seed=seed)
        return [completion.token_ids for group in groups for completion in group]

    engine.load(Trainer(make_policy()).weights(), version=0)
    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first
    assert len({tuple(ids) for ids in first}) > 4


def test_greedy_takes_the_likeliest_token(engine: VLLMEngine) -> None:
    policy = make_policy()
    engine.load(Trainer(policy).weights(), version=0)
    completion = greedy(engine)
    tokens = torch.tensor(LONG_PROMPT)
    for token in completion.token_ids:
        with torch.no_grad():
            assert policy(tokens).logits[0, -1].argmax().item() == token
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


# The cache.


def test_what_was_sampled_before_changes_nothing(engine: VLLMEngine) -> None:
    """A resumed run checks its engine first, a run that never stopped does not."""

    def draw() -> list[list[int]]:
        prompts = [*LONG_PROMPT, *LONG_PROMPT, *PROMPTS]
        groups = engine.generate(prompts, SamplingParams(12), num_completions=4, seed=3)
        return [completion.token_ids for group in groups for completion in group]

    engine.load(Trainer(make_policy()).weights(), version=0)
    first = draw()
    greedy(engine)
    assert draw() == first


@pytest.mark.parametrize("how", ["merge", "load"])
def test_warm_and_cold_cache_answer_alike_after_a_sync(engine: VLLMEngine, how: str) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    old = greedy(engine)
    assert greedy(engine).token_ids == old.token_ids  # warm
    resets = []
    reset = engine._llm.reset_prefix_cache
    engine._llm.reset_prefix_cache = lambda: resets.append(1) or reset()
    try:
        factors = [trainer.step(), trainer.step()]
        if how == "merge":
            engine.merge(factors)
        else:
            engine.load(trainer.weights(), version=2)
        assert len(resets) == 1
    finally:
        del engine._llm.reset_prefix_cache
    warm = greedy(engine)
    assert warm.token_ids != old.token_ids
    engine.refresh(version=2)
    cold = greedy(engine)
    assert warm.token_ids == cold.token_ids
    torch.testing.assert_close(warm.logprobs, cold.logprobs, rtol=0, atol=1e-5)


def test_the_cache_is_really_in_use(engine: VLLMEngine) -> None:
    """Without the reset the answer above would be another one, so the test could fail."""
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    greedy(engine)
    factors = trainer.step(), trainer.step()
    engine._started().merge(factors, [])  # behind the engine's back
    engine._cache_used = False
    stale = greedy(engine)
    engine.refresh(version=2)
    assert (stale.logprobs - greedy(engine).logprobs).abs().max() > 1e-3


# What is refused.


def test_what_does_not_fit_the_engine_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match="140 tokens and completions up to 400"):
        engine.generate(LONG_PROMPT, SamplingParams(400), num_completions=1, seed=0)
    with pytest.raises(ValueError, match="sets dtype, seed, which VLLMEngine sets itself"):
        VLLMEngine(engine_args={"seed": 1, "dtype": "half"})
    with pytest.raises(RuntimeError, match="another VLLMEngine is running"):
        make_engine().start(make_policy(), [1])


@pytest.mark.usefixtures("alone")
def test_sleep_and_fp16_are_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="float16, but VLLMEngine serves"):
        make_engine().start(make_policy(torch.float16), [1])
    with pytest.raises(ValueError, match="sleep needs CUDA"):
        make_engine(sleep="kv").start(make_policy(), [1])


# With engines of their own.


@pytest.fixture
def process_unchanged(alone: None) -> Iterator[None]:
    """What belongs to the process is after the test as it was before."""
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)

    def state() -> tuple[Any, ...]:
        own = ("PYTEST", "_TORCHINDUCTOR")
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_default_dtype(),
            torch.distributed.is_initialized(),
            {k: v for k, v in os.environ.items() if not k.startswith(own)},
        )

    before = state()
    yield
    assert state() == before


@pytest.mark.usefixtures("process_unchanged")
def test_a_policy_that_vllm_does_not_hold_one_by_one_is_refused() -> None:
    policy = make_policy()
    policy.model.layers[0].self_attn.register_parameter("gate", nn.Parameter(torch.ones(2)))
    engine = make_engine()
    with pytest.raises(ValueError, match="does not know 'model.layers.0.self_attn.gate'"):
        engine.start(policy, [1])
    assert engine._llm is None


@pytest.mark.usefixtures("process_unchanged")
def test_a_tied_head_stays_tied_and_an_engine_starts_again() -> None:
    policy = make_policy(tie_word_embeddings=True)
    engine = make_engine()
    for _ in range(2):
        engine.start(policy, [1])
        assert errors(engine, policy).max() < 1e-4
        policy.model.embed_tokens.weight.data.mul_(1.3)
        embedding = PolicyWeight("model.embed_tokens.weight", policy.model.embed_tokens.weight.data)
        engine.load([embedding], version=1)
        assert errors(engine, policy).max() < 1e-4
        engine.close()
    assert engine.policy_version is None
    with pytest.raises(RuntimeError, match="call start first"):
        engine.generate(PROMPTS, SamplingParams(4), num_completions=1, seed=0)


@pytest.mark.usefixtures("process_unchanged")
def test_nothing_is_taken_from_the_models_generation_config(tmp_path: Path) -> None:
    policy = make_policy()
    policy.generation_config.update(
        do_sample=True, top_k=1, repetition_penalty=1.3, temperature=0.1, eos_token_id=5
    )
    policy.save_pretrained(tmp_path)
    hostile = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert hostile.generation_config.top_k == 1
    engine = make_engine()
    engine.start(hostile, [1])
    assert errors(engine, hostile).max() < 1e-4
    group = engine.generate(PROMPTS, SamplingParams(12), num_completions=8, seed=0)[0]
    assert len({tuple(c.token_ids) for c in group}) > 4
    engine.close()


# In other processes.


# ZeroMQ's sockets of vLLM's client are closed when they are collected.
unclosed_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check_other_processes(**options: Any) -> None:
    trainer = Trainer(make_policy(torch.bfloat16))
    engine = make_engine(**options)
    engine.start(trainer.policy, [1])
    try:
        assert not engine._started().in_process
        engine.load(trainer.weights(), version=0)
        engine.merge([trainer.step(), trainer.step()])
        assert engine.differing(trainer.weights()) == []
        assert errors(engine, trainer.policy).mean() < 0.05
        few = {"policy.model.layers.0.mlp.up_proj": torch.zeros(96, 8, dtype=torch.bfloat16)}
        with pytest.raises(ValueError, match="unknown none; missing 'policy.model.layers.0"):
            engine.merge([replace(trainer.step(), directions=few)])
        with pytest.raises(ValueError, match="it runs in other processes"):
            engine.share(trainer.policy)
        drawn = [
            engine.generate(PROMPTS, SamplingParams(8), num_completions=4, seed=seed)
            for seed in (3, 3, 4)
        ]
        ids = [[c.token_ids for group in groups for c in group] for groups in drawn]
        assert ids[0] == ids[1] != ids[2]
    finally:
        engine.close()


@unclosed_sockets
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_factors_reach_an_engine_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    check_other_processes()


@unclosed_sockets
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each of two workers")
def test_factors_reach_two_tensor_parallel_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    check_other_processes(tensor_parallel_size=2)
