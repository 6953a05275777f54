"""VLLMWeights: bits that stay equal, mistakes that are named; without vLLM where it can be."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.engines.vllm_weights import VLLMWeights, messages
from logra_lightning.engines.vllm_worker import WorkerExtension
from logra_lightning.sketch import Factors
from logra_lightning.sketch.master import join, split
from tests.tiny_vllm import PROMPTS, Trainer, errors, make_engine, make_policy

# Without vLLM: our worker's methods on plain modules.


class Workers:
    """A `vllm.LLM` as far as weights are concerned, with one worker for each model."""

    def __init__(self, *models: nn.Module) -> None:
        self.workers = [WorkerExtension() for _ in models]
        for worker, model in zip(self.workers, models, strict=True):
            worker.model_runner = type("", (), {"get_model": lambda self, model=model: model})()

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]


def weights_of(*models: nn.Module, in_process: bool = True) -> VLLMWeights:
    return VLLMWeights(Workers(*models), torch.float32, in_process=in_process)


class Half(nn.Linear):
    """The left or right half of a layer with 10 inputs and 6 outputs, as vLLM cuts it."""

    def __init__(self, index: int) -> None:
        super().__init__(5, 6, bias=False)
        self.tp_rank, self.input_size = index, 10


Half.__name__ = "RowParallelLinear"


def test_messages_end_with_the_weight_that_reaches_the_limit() -> None:
    weights = [PolicyWeight(str(i), torch.zeros(5, dtype=torch.bfloat16)) for i in range(5)]

    def lengths(limit: int) -> list[int]:
        return [len(message) for message in messages(weights, limit)]

    assert lengths(16) == [2, 2, 1]
    assert lengths(10) == [1] * 5
    assert lengths(1000) == [5]
    assert list(messages([], 10)) == []


@pytest.mark.parametrize("in_process", [True, False])
def test_weights_and_factors_reach_the_worker_as_they_are_or_as_bytes(in_process: bool) -> None:
    trainer = Trainer(make_policy())
    weights = weights_of(copy.deepcopy(trainer.policy), in_process=in_process)
    weights.check_policy(trainer.policy)
    weights.load(trainer.weights())
    trainer.policy.model.norm.weight.data.mul_(1.1)
    norm = PolicyWeight("model.norm.weight", trainer.policy.model.norm.weight.data)
    updates = [trainer.step(), trainer.step()]
    assert len(weights.differing(trainer.weights())) == len(trainer.targets) + 1
    weights.merge(updates, [norm])
    assert weights.differing(trainer.weights()) == []


@pytest.mark.parametrize("in_process", [True, False])
def test_a_difference_in_one_of_two_workers_is_found(in_process: bool) -> None:
    halves = [nn.ModuleDict({"down": Half(index)}) for index in (0, 1)]
    weights = weights_of(*halves, in_process=in_process)
    assert weights.shapes == {"down.weight": [6, 10]}
    weight = PolicyWeight("down.weight", torch.randn(6, 10), None, "policy.down")
    weights.load([weight])
    assert weights.differing([weight]) == []
    halves[1]["down"].weight.data[5, 4] += 1
    assert weights.differing([weight]) == ["down.weight"]


def test_factors_that_do_not_fit_change_nothing() -> None:
    trainer = Trainer(make_policy())
    weights = weights_of(copy.deepcopy(trainer.policy))
    weights.load(trainer.weights())
    before = weights.call("checksums")
    first, second = trainer.step(), trainer.step()
    old, new = "policy.model.layers.0.self_attn.q_proj", "policy.model.layers.7.self_attn.q_proj"
    renamed = {new if name == old else name: d for name, d in second.directions.items()}
    with pytest.raises(
        ValueError, match=f"of policy version 1 do not fit.*unknown '{new}'; missing '{old}'"
    ):
        weights.merge([first, replace(second, directions=renamed)], [])
    assert weights.call("checksums") == before
    weights.merge([first, replace(second, directions={})], [])  # a step that changed nothing
    assert weights.call("checksums") != before


def test_weights_that_the_engine_does_not_know_are_refused() -> None:
    weights = weights_of(make_policy())
    with pytest.raises(ValueError, match="no weight 'base_model.norm.weight' of shape"):
        weights.load([PolicyWeight("base_model.norm.weight", torch.ones(64))])
    with pytest.raises(ValueError, match=r"'model.norm.weight' of shape \[63\] but \[64\]"):
        weights.merge([], [PolicyWeight("model.norm.weight", torch.ones(63))])


def test_a_policy_on_another_device_or_of_another_shape_is_refused() -> None:
    policy = make_policy()
    weights = weights_of(policy)
    with pytest.raises(ValueError, match="the policy is on meta and vLLM on cpu, where the same"):
        weights.check_policy(copy.deepcopy(policy).to("meta"))
    other = copy.deepcopy(policy)
    other.lm_head = nn.Linear(64, 60)
    with pytest.raises(
        ValueError,
        match=r"expects none, does not know 'lm_head.bias', and has another shape for 'lm_head.wei",
    ):
        weights.check_policy(other)
    other.lm_head = None
    with pytest.raises(ValueError, match="it also expects 'lm_head.weight', does not know none"):
        weights.check_policy(other)


def test_shared_memory_that_was_replaced_is_noticed() -> None:
    policy = make_policy()
    weights = weights_of(copy.deepcopy(policy))
    assert weights.why_not_shared(policy) == ""
    weights.share(policy)
    weights.check_shared()
    policy.model.norm.weight.data.mul_(2)
    weights.check_shared()
    policy.model.norm.weight.data = policy.model.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match="'model.norm.weight' no longer shares its memory"):
        weights.check_shared()


def test_why_weights_cannot_be_shared_is_told() -> None:
    policy = make_policy()
    weights = VLLMWeights(Workers(make_policy()), torch.bfloat16, in_process=True)
    expected = r"is torch.float32 in the policy and torch.bfloat16 in the engine; set model.engine"
    with pytest.raises(ValueError, match=expected):
        engine_with(weights).share(policy)
    with pytest.raises(ValueError, match="sleep=weights would give them back"):
        engine_with(weights, sleep="weights").share(policy)
    weights.in_process = False
    with pytest.raises(ValueError, match="it runs in other processes"):
        engine_with(weights).share(policy)
    halves = weights_of(nn.ModuleDict({"down": Half(0)}))
    whole = nn.ModuleDict({"down": nn.Linear(10, 6, bias=False)})
    with pytest.raises(ValueError, match="does not hold 'down.weight' in one piece"):
        engine_with(halves).share(whole)


def engine_with(weights: VLLMWeights, **options: Any) -> VLLMEngine:
    engine = make_engine(**options)
    engine._weights = weights
    return engine


# On vLLM.

vllm = pytest.mark.vllm


@vllm
@pytest.mark.parametrize("mode", ["factors", "dense"])
def test_logprobs_are_those_of_the_trainer_after_0_1_and_3_syncs(
    engine: VLLMEngine, mode: str
) -> None:
    trainer = Trainer(make_policy())
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
        else:
            engine.load(trainer.weights(exact=False), version=trainer.version)
        assert engine.policy_version == trainer.version


@vllm
def test_one_updated_weight_leaves_all_others_bit_equal(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy(), ["model.layers.1.self_attn.v_proj"])
    engine.load(trainer.weights(), version=0)
    views = views_of(engine)
    before = {name: view.clone() for name, view in views.items()}
    engine.merge([trainer.step()])
    changed = [name for name, view in views.items() if not torch.equal(view, before[name])]
    assert changed == ["model.layers.1.self_attn.v_proj.weight"]
    assert engine.differing(trainer.weights()) == []


def views_of(engine: VLLMEngine) -> dict[str, Tensor]:
    return engine._started().call("views")[0]


@vllm
def test_a_difference_of_one_bit_is_found_and_named(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    name = "model.layers.0.mlp.up_proj.weight"
    views_of(engine)[name].view(torch.int32)[5, 7] ^= 1
    assert engine.differing(trainer.weights()) == [name]


@vllm
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


@vllm
def test_versions_must_follow_on_and_names_fit(engine: VLLMEngine) -> None:
    trainer = Trainer(make_policy())
    engine.load(trainer.weights(), version=0)
    first, second = trainer.step(), trainer.step()
    with pytest.raises(ValueError, match="holds policy version 0, the next factors are for 1"):
        engine.merge([second])
    few = dict(list(first.directions.items())[1:])
    with pytest.raises(ValueError, match=r"unknown none; missing 'policy.model.layers.0.self_attn"):
        engine.merge([replace(first, directions=few)])
    with pytest.raises(ValueError, match=r"of shape \[63\] but \[64\]"):
        engine.load([PolicyWeight("model.norm.weight", torch.ones(63))], version=1)
    engine.merge([first])
    with pytest.raises(ValueError, match="holds policy version 1, the next factors are for 0"):
        engine.merge([first])
    engine.merge([second])
    assert engine.differing(trainer.weights()) == []


def test_a_step_that_changed_nothing_only_counts() -> None:
    engine = engine_with(weights_of(make_policy()))  # without an LLM to ask for anything
    engine.policy_version = 3
    engine.merge([Factors(version, 0, version, "rademacher", 1.0, {}) for version in (3, 4)])
    assert engine.policy_version == 5


def check_300_syncs(engine: VLLMEngine, trainer: Trainer) -> None:
    engine.load(trainer.weights(), version=0)
    assert engine.differing(trainer.weights()) == []
    for _ in range(75):  # four steps per sync
        engine.merge([trainer.step(1e-3) for _ in range(4)])
    assert engine.policy_version == 300
    assert engine.differing(trainer.weights()) == []
    # The oracle of the oracle: what the engine computes with is the master, rounded once.
    name = "model.layers.1.self_attn.k_proj"
    held = views_of(engine)[f"{name}.weight"]
    weight, low = trainer.targets[name].weight, trainer.residuals.get(name)
    master = weight.data if low is None else join(weight.data, low)
    expected = master if held.dtype == torch.float32 else split(master)[0]
    assert torch.equal(held, expected)


@vllm
def test_bits_are_equal_after_300_factor_syncs_in_fp32(engine: VLLMEngine) -> None:
    check_300_syncs(engine, Trainer(make_policy()))


@vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.usefixtures("alone")
def test_bits_of_a_bf16_engine_are_equal_after_300_factor_syncs(dtype: torch.dtype) -> None:
    trainer = Trainer(make_policy(dtype))
    engine = make_engine(dtype="bfloat16")
    engine.start(trainer.policy, [1])
    check_300_syncs(engine, trainer)
    engine.close()


@vllm
@pytest.mark.usefixtures("alone")
def test_shared_weights_are_one_memory_and_outlive_the_engine() -> None:
    trainer = Trainer(make_policy(tie_word_embeddings=True))
    policy = trainer.policy
    parameters = dict(policy.named_parameters())
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    engine = make_engine()
    engine.start(policy, [1])
    engine.share(policy)
    views = views_of(engine)
    for name, parameter in policy.named_parameters():
        assert parameter is parameters[name]
        assert parameter.data_ptr() == views[name].data_ptr()
        assert torch.equal(parameter, expected[name])
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    for syncs in range(4):
        assert errors(engine, policy, seed=syncs).max() < 1e-4
        assert engine.differing(trainer.weights()) == []
        trainer.step()
        assert engine.policy_version == syncs
        engine.refresh(version=trainer.version)
        assert engine.policy_version == trainer.version
    # Training goes on through the views, also when the engine samples in the middle.
    loss = policy(torch.tensor(PROMPTS[:1])).logits.square().mean()
    errors(engine, policy)
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.sub_(parameter.grad, alpha=0.5)
    engine.refresh(version=5)
    assert errors(engine, policy).max() < 1e-4
    engine.close()
    del views
    policy(torch.tensor(PROMPTS[:1])).logits.sum().backward()
