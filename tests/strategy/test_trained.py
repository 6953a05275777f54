"""The layers that train are those of the strategy's option, or of AdamW's where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from logra_lightning import AdamWOptions, SketchStrategy
from logra_lightning.policy import what_trains
from logra_lightning.strategy import freeze_others_, trained
from tests.conftest import SIZES, TINY_POLICY
from tests.runs import data, fit, policy, trainer, weights


def trained_kinds(llama: LlamaForCausalLM, strategy: Strategy, adamw: AdamWOptions) -> set[str]:
    freeze_others_(llama, strategy, adamw, train_others=False)
    return {name.split(".")[-2] for name, p in llama.named_parameters() if p.requires_grad}


def test_dense_training_has_an_option_of_its_own(llama: LlamaForCausalLM) -> None:
    dense = SingleDeviceStrategy("cpu")
    sketch = SketchStrategy(targets=["v_proj"])
    narrowed = AdamWOptions(targets=["q_proj", "o_proj"])
    assert trained_kinds(llama, dense, narrowed) == {"q_proj", "o_proj"}
    assert trained_kinds(llama, sketch, narrowed) == {"v_proj"}
    everything = trained_kinds(llama, SketchStrategy(), narrowed)
    assert trained_kinds(llama, dense, AdamWOptions()) == everything
    assert len(everything) == 7


def test_a_wrong_name_is_told_with_the_option_of_the_strategy(llama: LlamaForCausalLM) -> None:
    for strategy, option in (
        (SingleDeviceStrategy("cpu"), r"set model\.adamw\.targets"),
        (SketchStrategy(targets=["qproj"]), r"set trainer\.strategy\.init_args\.targets"),
    ):
        with pytest.raises(ValueError, match=option):
            freeze_others_(llama, strategy, AdamWOptions(targets=["qproj"]), train_others=False)


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy whose matrices are fused."""
    folder = tmp_path_factory.mktemp("phi")
    sizes = LlamaConfig.from_pretrained(TINY_POLICY).to_dict()
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads max_position_embeddings pad_token_id eos_token_id bos_token_id"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Phi3ForCausalLM(Phi3Config(**{name: sizes[name] for name in names.split()}))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("strategy", ["auto", "sketch"])
def test_fused_matrices_train_and_evaluation_freezes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phi: str, strategy: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(trained, "rank_zero_info", told.append)

    def made() -> Any:
        return "auto" if strategy == "auto" else SketchStrategy(rank=16)

    module = policy(model=phi, adamw=AdamWOptions(lr=1e-2))
    trainer(tmp_path, limit_val_batches=1, strategy=made()).validate(
        module, datamodule=data(tmp_path), verbose=False
    )
    assert all(p.requires_grad for p in module.policy.parameters())
    assert told == []
    before = weights(module)
    with pytest.warns(UserWarning, match="cut off"):  # it knows nothing, so it rarely stops
        fit(tmp_path, module, steps=1, strategy=made())
    moved = {n.split(".")[-2] for n, w in weights(module).items() if not torch.equal(w, before[n])}
    assert moved == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    (line,) = told
    kinds = "(o_proj, qkv_proj, gate_up_proj, down_proj)"
    assert f"{'dense' if strategy == 'auto' else 'weights sketched'} {kinds}" in line


def mixture(**options: Any) -> Qwen2MoeForCausalLM:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**(sizes | {"shared_expert_intermediate_size": 24} | options))
        )


@pytest.mark.parametrize(
    ("strategy", "way_out"),
    [
        (SketchStrategy(), r"set trainer\.strategy\.init_args\.frozen_experts=true"),
        (SingleDeviceStrategy("cpu"), r"set model\.train_others=true"),
    ],
)
def test_experts_that_would_not_train_are_refused_with_their_share(
    strategy: Strategy, way_out: str
) -> None:
    model = mixture()
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    share = experts / sum(p.numel() for p in model.parameters())
    assert 0.3 < share < 0.6
    with pytest.raises(ValueError, match=rf"routed experts, {share:.0%} of .*{way_out}"):
        freeze_others_(model, strategy, AdamWOptions(), train_others=False)


def test_frozen_experts_are_allowed_where_asked_for_and_said() -> None:
    model = mixture()
    strategy = SketchStrategy(frozen_experts=True)
    freeze_others_(model, strategy, AdamWOptions(), train_others=False)
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("shared_expert.up_proj" in name for name in trained_names)
    assert not any(".experts." in name for name in trained_names)
    assert "experts" in what_trains(model, []).split("frozen")[1]


def test_experts_that_train_densely_are_not_frozen() -> None:
    freeze_others_(mixture(), SingleDeviceStrategy("cpu"), AdamWOptions(), train_others=True)
