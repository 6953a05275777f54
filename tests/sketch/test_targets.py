"""Which layers are sketched: those that are named, or the linear ones of the decoder layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM

from logra_lightning.sketch import DEFAULT_TARGETS, find_targets
from tests.conftest import SIZES, Pair


def test_default_targets_are_attention_and_mlp_matrices(llama: LlamaForCausalLM) -> None:
    found = find_targets(llama)
    # The order of the sketches in their buffer, which checkpoints and engines know.
    assert list(found) == list(find_targets(llama, DEFAULT_TARGETS))
    assert len(found) == 2 * 7
    assert "model.layers.1.mlp.down_proj" in found
    assert llama.lm_head not in found.values()


def test_unknown_target_lists_what_exists(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"'qproj'; this model has down_proj, gate_proj, k_proj"):
        find_targets(llama, ["q_proj", "qproj"])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_embeddings_and_head_are_refused(llama: LlamaForCausalLM, target: str) -> None:
    with pytest.raises(ValueError, match=f"target '{target}' is an embedding or the output head"):
        find_targets(llama, ["q_proj", target])


def test_no_targets_are_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"model\.adamw\.targets is empty"):
        find_targets(llama, [], option="model.adamw.targets")


def test_wrapped_modules_keep_their_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    assert list(find_targets(Wrapper(Pair()), ["q_proj"])) == ["q_proj"]


def leaves(model: nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in find_targets(model)}


def made(config: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**(SIZES | options))
        )


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (
            "Phi3Config",
            {"pad_token_id": 0},
            {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
        ),
        ("Qwen3Config", {"head_dim": 12}, ATTENTION | MLP),
        # A shared expert, its gate, a router and experts in one parameter.
        ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 16}, ATTENTION | MLP),
        ("Qwen3MoeConfig", EXPERTS | {"head_dim": 12}, ATTENTION),
        ("GPTNeoXConfig", {}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    ],
)
def test_all_linear_layers_of_decoder_layers_are_found_whatever_their_names(
    config: str, options: dict[str, Any], expected: set[str]
) -> None:
    assert leaves(made(config, **options)) == expected


class Decoder(nn.Module):
    """Two layers, of which the second sends tokens to experts, and linear layers elsewhere."""

    def __init__(self) -> None:
        super().__init__()

        def linear(size: int = 4) -> nn.Linear:
            return nn.Linear(4, size)

        def experts() -> nn.ModuleList:
            return nn.ModuleList([nn.ModuleDict({"gate": linear(), "w1": linear()})])

        wrapped = nn.ModuleDict({"layer": linear()})
        block = nn.ModuleDict({"router": wrapped, "experts": experts(), "scores": linear(6)})
        adapter = nn.ModuleDict({"lora_A": linear(), "lora_B": linear()})
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict({"qkv": linear(), "adapter": adapter}),
                nn.ModuleDict({"mixer": linear(6), "moe": block}),
            ]
        )
        self.projections = nn.ModuleList([linear()])
        self.config = type("Config", (), {"num_local_experts": 6})()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(400, 400)])

    def get_decoder(self) -> nn.Module:
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower()
        self.decoder = Decoder()
        self.head = nn.Linear(4, 9)

    def get_decoder(self) -> nn.Module:
        return self.decoder


def test_routers_adapters_towers_and_heads_are_left_out() -> None:
    model = nn.ModuleDict({"policy": Model()})  # as a LightningModule holds it
    assert list(find_targets(model)) == [
        "policy.decoder.layers.0.qkv",
        "policy.decoder.layers.1.mixer",
        "policy.decoder.layers.1.moe.experts.0.gate",
        "policy.decoder.layers.1.moe.experts.0.w1",
    ]


def test_decoder_layers_without_linear_layers_name_the_option() -> None:
    model = made("GPT2Config", n_embd=48, n_head=4)  # its layers are a kind of their own
    with pytest.raises(ValueError, match=r"no linear layers; .*: set model\.adamw\.targets"):
        find_targets(model, option="model.adamw.targets")


def test_a_model_without_a_decoder_has_the_usual_names() -> None:
    layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in (*DEFAULT_TARGETS, "other")})
    assert list(find_targets(layers)) == list(DEFAULT_TARGETS)
    with pytest.raises(ValueError, match="no linear layer is called 'v_proj', 'gate_proj'"):
        find_targets(nn.ModuleDict({n: nn.Linear(3, 3) for n in ("q_proj", "k_proj", "o_proj")}))
