"""VLLMEngine: the trainer's logprobs, exact weights after every sync, a process left as it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.sketch import Factors, find_targets, merge_
from logra_lightning.sketch.master import join, split
from logra_lightning.types import Completion, SamplingParams
from tests.conftest import make_llama

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

RANK = 8
PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10]]
# The cache holds blocks of 32 tokens: this prompt fills four of them.
LONG_PROMPT = [[(7 * i) % 59 + 1 for i in range(140)]]


def make_policy(dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    """Heads as wide as vLLM wants them; a vocabulary that vLLM pads."""
    options = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1} | options
    policy = make_llama(**{"max_position_embeddings": 512, "intermediate_size": 96} | options)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():  # norms that are not one, logits that are not flat
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy.to(dtype)


def make_engine(**options: Any) -> VLLMEngine:
    args = {"block_size": 32, "max_num_seqs": 16} | options.pop("engine_args", {})
    return VLLMEngine(**({"kv_cache_memory_bytes": 1 << 24} | options), engine_args=args)


class Shared:
    """The fp32 engine of most tests; each loads the weights that it needs."""

    engine: VLLMEngine | None = None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture
def engine(shared: Shared) -> VLLMEngine:
    if shared.engine is None:
        shared.engine = make_engine()
        shared.engine.start(make_policy(), [1])
    return shared.engine


@pytest.fixture
def alone(shared: Shared) -> None:
    """vLLM runs one engine per process at a time."""
    shared.close()


class Trainer:
    """The trainer's side: weights, their masters, and updates merged into them."""

    def __init__(self, policy: LlamaForCausalLM, targets: list[str] | None = None) -> None:
        self.policy = policy
        self.targets = {
            name: module
            for name, module in find_targets(policy).items()
            if targets is None or name in targets
        }
        bf16 = policy.dtype == torch.bfloat16
        generator = torch.Generator().manual_seed(2)
        self.residuals: dict[str, Tensor] = {}
        for name, module in self.targets.items() if bf16 else ():
            noise = torch.randn(module.weight.shape, generator=generator) * 1e-5
            weight, residual = split(module.weight.detach().to(torch.float32) + noise)
            module.weight.data, self.residuals[name] = weight, residual
        self.version = 0

    def weights(self, *, exact: bool = True) -> Iterator[PolicyWeight]:
        for name, parameter in self.policy.named_parameters():
            module = name.removesuffix(".weight")
            if exact and module in self.targets:
                residual = self.residuals.get(module)
                yield PolicyWeight(name, parameter.data, residual, f"policy.{module}")
            else:
                yield PolicyWeight(name, parameter.data)

    def step(self, size: float = 0.02, decay: float = 0.999) -> Factors:
        """A random update, merged into the trainer's weights."""
        generator = torch.Generator().manual_seed(self.version)
        directions = {}
        for name, module in self.targets.items():
            direction = torch.randn(module.out_features, RANK, generator=generator) * size
            directions[f"policy.{name}"] = direction.to(torch.bfloat16)
        factors = Factors(self.version, 5, self.version, "rademacher", decay, directions)
        for name, module in self.targets.items():
            entries = factors.entries(
                f"policy.{name}", module.in_features, device=torch.device("cpu")
            )
            residual = self.residuals.get(name)
            merge_(
                module.weight, directions[f"policy.{name}"], entries, decay=decay, residual=residual
            )
        self.version += 1
        return factors


def errors(
    engine: VLLMEngine, policy: nn.Module, temperature: float = 1.0, seed: int = 0
) -> Tensor:
    """Absolute differences of the engine's logprobs to those of a plain forward pass."""
    sampling = SamplingParams(12, temperature=temperature)
    groups = engine.generate(PROMPTS, sampling, num_completions=4, seed=seed)
    found = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = policy(tokens).logits[0, len(prompt) - 1 : -1].to(torch.float32)
            logprobs = torch.log_softmax(logits / temperature, dim=-1)
            drawn = torch.tensor(completion.token_ids)[:, None]
            found.append(logprobs.gather(1, drawn)[:, 0] - completion.logprobs)
    return torch.cat(found).abs()


def greedy(engine: VLLMEngine) -> Completion:
    sampling = SamplingParams(16, temperature=0.0)
    return engine.generate(LONG_PROMPT, sampling, num_completions=1, seed=0)[0][0]


# Logprobs.


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_those_of_the_trainer(engine: VLLMEngine, temperature: float) -> None:
    policy = make_policy()
    engine.load(Trainer(policy).weights(), version=0)
    assert errors(engine, policy, temperature).max() < 1e-4


@pytest.mark.parametrize("mode", ["factors", "dense", "shared"])
@pytest.mark.usefixtures("alone")
def test_logprobs_are_those_of_the_trainer_after_0_1_and_3_syncs(mode: str) -> None:
    trainer = Trainer(make_policy())
    engine = make_engine()
    engine.start(trainer.policy, [1])
    if mode == "shared":
        engine.share(trainer.policy)
    else:
        engine.load(trainer.weights(exact=mode == "factors"), version=0)
    start = trainer.policy.get_parameter("model.layers.0.self_attn.q_proj.weight").clone()
    for syncs in range(4):
        if syncs in (0, 1, 3):
            assert errors(engine, trainer.policy, seed=syncs).max() < 1e-4
            assert engine.differing(trainer.weights()) == []
        before = trainer.version
        factors = trainer.step()
        assert not torch.equal(
            trainer.policy.get_parameter("model.layers.0.self_attn.q_proj.weight"), start
        )
        assert engine.policy_version == before
        if mode == "factors":
            engine.merge([factors])
        elif mode == "dense":
            engine.load(trainer.weights(exact=False), version=trainer.version)
        else:
            engine.refresh(version=trainer.version)
        assert engine.policy_version == trainer.version
    engine.close()


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


# Exact weights.


@pytest.mark.parametrize("dtypes", ["fp32 in both", "bf16 in both", "fp32 trainer, bf16 engine"])
@pytest.mark.usefixtures("alone")
def test_bits_are_equal_after_300_factor_syncs(dtypes: str) -> None:
    trainer = Trainer(make_policy(torch.bfloat16 if dtypes == "bf16 in both" else torch.float32))
    engine = make_engine(dtype="float32" if dtypes == "fp32 in both" else "bfloat16")
    engine.start(trainer.policy, [1])
    engine.load(trainer.weights(), version=0)
    assert engine.differing(trainer.weights()) == []
    for _ in range(75):  # four steps per sync
        engine.merge([trainer.step(1e-3) for _ in range(4)])
    assert engine.policy_version == 300
    assert engine.differing(trainer.weights()) == []
    # The oracle of the oracle: what the engine computes with is the master, rounded once.
    name = "model.layers.1.self_attn.k_proj"
    held = engine._call("views")[0][f"{name}.weight"]
    weight, low = trainer.targets[name].weight, trainer.residuals.get(name)
    master = weight.data if low is None else join(weight.data, low)
    expected = master if held.dtype == torch.float32 else split(master)[0]
    assert torch.equal(held, expected)
    engine.close()


def test_one_updated_weight_leaves_all_others_bit_equal(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy(), ["model.layers.1.self_attn.v_proj"])
    engine.load(trainer.weights(), version=0)
    views = engine._call("views")[0]
    before = {name: view.clone() for name, view in views.items()}
    engine.merge([trainer.step()])
    changed = [name for name, view in views.items() if not torch.equal(view, before[name])]
    assert changed == ["model.layers.1.self_attn.v_proj.weight"]
    assert engine.differing(trainer.weights()) == []


def test_a_difference_of_one_bit_is_found_and_named(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    name = "model.layers.0.mlp.up_proj.weight"
    engine._call("views")[0][name].view(torch.int32)[5, 7] ^= 1
    assert engine.differing(trainer.weights()) == [name]


def test_dense_weights_travel_along_with_factors(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    trainer.policy.model.norm.weight.data.mul_(1.1)
    trainer.policy.model.embed_tokens.weight.data.mul_(0.9)
    factors = trainer.step()
    changed = ("model.norm.weight", "model.embed_tokens.weight")
    engine.merge([factors], [w for w in trainer.weights() if w.name in changed])
    assert engine.differing(trainer.weights()) == []
    assert errors(engine, trainer.policy).max() < 1e-4


@pytest.mark.usefixtures("alone")
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
    engine._call("merge", list(factors), [])  # behind the engine's back
    engine._cache_used = False
    stale = greedy(engine)
    engine.refresh(version=2)
    assert (stale.logprobs - greedy(engine).logprobs).abs().max() > 1e-3


# What is refused.


def test_versions_must_follow_on(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    first, second = trainer.step(), trainer.step()
    with pytest.raises(ValueError, match="holds policy version 0, the next factors are for 1"):
        engine.merge([second])
    engine.merge([first])
    with pytest.raises(ValueError, match="holds policy version 1, the next factors are for 0"):
        engine.merge([first])
    engine.merge([second])
    assert engine.differing(trainer.weights()) == []


def test_unknown_and_missing_names_are_listed(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    factors = trainer.step()
    renamed = {
        name.replace("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj"): d
        for name, d in factors.directions.items()
    }
    with pytest.raises(ValueError, match="unknown policy.model.layers.7.*missing policy.mod"):
        engine.merge([replace(factors, directions=renamed)])
    with pytest.raises(ValueError, match="no weight 'base_model.norm.weight'"):
        engine.load([PolicyWeight("base_model.norm.weight", torch.ones(64))], version=1)
    with pytest.raises(ValueError, match=r"of shape \[63\] but \[64\]"):
        engine.load([PolicyWeight("model.norm.weight", torch.ones(63))], version=1)


@pytest.mark.usefixtures("alone")
def test_a_policy_that_vllm_does_not_hold_one_by_one_is_refused() -> None:
    policy = make_policy()
    policy.model.layers[0].self_attn.register_parameter("gate", nn.Parameter(torch.ones(2)))
    engine = make_engine()
    with pytest.raises(ValueError, match="does not know 'model.layers.0.self_attn.gate'"):
        engine.start(policy, [1])
    assert engine._llm is None


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


@pytest.mark.usefixtures("alone")
def test_sharing_is_refused_with_the_reason() -> None:
    policy = make_policy()
    engine = make_engine(dtype="bfloat16")
    engine.start(policy, [1])
    with pytest.raises(ValueError, match=r"is torch.float32 in the policy and torch.bfloat16 in"):
        engine.share(policy)
    engine.sleep_mode = "weights"
    with pytest.raises(ValueError, match="sleep=weights would give them back"):
        engine.share(policy)
    engine._in_process = False
    with pytest.raises(ValueError, match="runs in other processes"):
        engine.share(policy)
    engine._in_process, engine.sleep_mode = True, "none"
    engine.close()


@pytest.mark.usefixtures("alone")
def test_shared_weights_are_one_memory_and_outlive_the_engine() -> None:
    policy = make_policy(tie_word_embeddings=True)
    parameters = dict(policy.named_parameters())
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    engine = make_engine()
    engine.start(policy, [1])
    engine.share(policy)
    views = engine._call("views")[0]
    for name, parameter in policy.named_parameters():
        assert parameter is parameters[name]
        assert parameter.data_ptr() == views[name].data_ptr()
        assert torch.equal(parameter, expected[name])
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    # Training goes on through the views, also when the engine samples in the middle.
    loss = policy(torch.tensor(PROMPTS[:1])).logits.square().mean()
    errors(engine, policy)
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.sub_(parameter.grad, alpha=0.5)
    engine.refresh(version=1)
    assert errors(engine, policy).max() < 1e-4
    engine.close()
    del views
    policy(torch.tensor(PROMPTS[:1])).logits.sum().backward()


# The process.


@pytest.mark.usefixtures("alone")
def test_start_generate_and_stop_leave_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_default_dtype(),
        torch.distributed.is_initialized(),
        dict(os.environ),
    )
    engine = make_engine()
    for _ in range(2):
        engine.start(make_policy(), [1])
        engine.generate(PROMPTS, SamplingParams(4), num_completions=2, seed=5)
        engine.close()
    state = torch.get_rng_state()
    assert torch.equal(before[0], state)
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert before[3] == torch.get_num_threads()
    assert before[4] is torch.set_num_threads
    assert before[5] == torch.get_default_dtype()
    assert before[6] == torch.distributed.is_initialized()
    changed = {k for k, v in os.environ.items() if before[7].get(k) != v}
    assert {k for k in changed if not k.startswith(("PYTEST", "_TORCHINDUCTOR"))} == set()


@pytest.mark.usefixtures("alone")
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


# Other processes.


# ZeroMQ's sockets of vLLM's client are closed when they are collected.
unclosed_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check_other_processes(**options: Any) -> None:
    trainer = Trainer(make_policy(torch.bfloat16))
    engine = make_engine(**options)
    engine.start(trainer.policy, [1])
    try:
        assert not engine._in_process
        engine.load(trainer.weights(), version=0)
        engine.merge([trainer.step(), trainer.step()])
        assert engine.differing(trainer.weights()) == []
        assert errors(engine, trainer.policy).mean() < 0.05
        drawn = [
            engine.generate(PROMPTS, SamplingParams(8), num_completions=4, seed=seed)
            for seed in (3, 3, 4)
        ]
        ids = [[c.token_ids for group in groups for c in group] for groups in drawn]
        assert ids[0] == ids[1] != ids[2]
    finally:
        engine.close()


@unclosed_sockets
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
