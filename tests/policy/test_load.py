"""The policy is loaded without dropout, in the default dtype, with its own stop tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from logra_lightning.policy.load import (
    check_model_kwargs,
    context_length,
    exact_buffers,
    fixed_context_length,
    freeze_,
    load_config,
    load_policy,
    plain_layers,
    policy_source,
    policy_without_weights,
    stop_token_ids,
)
from logra_lightning.sketch import DEFAULT_TARGETS
from logra_lightning.tokenizer import load_tokenizer
from tests.conftest import SIZES, TINY_POLICY, make_llama
from tests.hybrids import make_hybrid


def test_dropout_is_off_although_the_model_is_in_training_mode(tmp_path: Path) -> None:
    make_llama(attention_dropout=0.5).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    assert policy.training
    tokens = torch.arange(10)[None]
    assert torch.equal(policy(input_ids=tokens).logits, policy(input_ids=tokens).logits)


def test_dtype_is_torchs_default_unless_given() -> None:
    assert load_policy(str(TINY_POLICY)).dtype == torch.float32
    assert load_policy(str(TINY_POLICY), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_policy_without_weights_needs_its_config_alone(tmp_path: Path) -> None:
    make_llama(attention_dropout=0.5).config.save_pretrained(tmp_path)
    options = {"attn_implementation": "eager", "dtype": "bfloat16"}
    policy = policy_without_weights(str(tmp_path), num_hidden_layers=1, **options)
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert policy.config._attn_implementation == "eager"
    assert policy.config.num_hidden_layers == 1
    assert policy.training
    assert policy.model.layers[0].self_attn.attention_dropout == 0
    with pytest.raises(ValueError, match="there is no model folder"):
        policy_without_weights(str(tmp_path / "nowhere"))


def test_stop_tokens_and_context_of_the_tiny_policy() -> None:
    policy, tokenizer = load_policy(str(TINY_POLICY)), load_tokenizer(str(TINY_POLICY))
    assert stop_token_ids(policy, tokenizer) == [tokenizer.eos_token_id]
    policy.generation_config.eos_token_id = [7, tokenizer.eos_token_id]
    assert stop_token_ids(policy, tokenizer) == sorted([7, tokenizer.eos_token_id])
    assert context_length(policy.config) == 64


@pytest.mark.parametrize("train_others", [False, True])
def test_freeze_leaves_a_gradient_to_the_targets(
    llama: LlamaForCausalLM, train_others: bool
) -> None:
    freeze_(llama, DEFAULT_TARGETS, train_others=train_others)
    trained = {name for name, p in llama.named_parameters() if p.requires_grad}
    projections = {name for name, _ in llama.named_parameters() if "_proj." in name}
    everything = {name for name, _ in llama.named_parameters()}
    assert trained == (everything if train_others else projections)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"load_in_4bit": True}, "has load_in_4bit, which does not work here: quantized weights"),
        ({"device_map": "auto"}, "device_map, .* set trainer.accelerator"),
        ({"dtype": "float16"}, "dtype 'float16', but weights are float32 or bfloat16"),
        ({"torch_dtype": torch.float16}, "dtype 'float16'"),
        ({"dtype": "bf16"}, "dtype 'bf16'"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "both dtype and torch_dtype"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        check_model_kwargs(options)


def test_old_and_new_names_of_the_dtype_mean_the_same() -> None:
    for options in ({"torch_dtype": "bfloat16"}, {"dtype": torch.bfloat16}):
        assert load_policy(str(TINY_POLICY), **options).dtype == torch.bfloat16


def test_a_config_has_the_options_that_change_it_and_no_weights_are_read(tmp_path: Path) -> None:
    make_llama().config.save_pretrained(tmp_path)
    config = load_config(str(tmp_path), max_position_embeddings=7, attn_implementation="eager")
    assert config.max_position_embeddings == 7


def test_an_adapter_and_a_quantized_model_are_refused(tmp_path: Path) -> None:
    llama = make_llama()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    llama.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    llama.config.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match="is an adapter: merge it into its model first"):
        load_policy(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="is quantized, and quantized weights cannot be trained"):
        load_policy(str(tmp_path / "quantized"))


@pytest.mark.parametrize("load", [load_policy, load_tokenizer])
def test_a_name_that_nobody_knows_is_told_in_one_line(
    load: Callable[..., object],
) -> None:
    with pytest.raises(ValueError, match="'nobody/nothing' cannot be loaded") as error:
        load("nobody/nothing", local_files_only=True)  # the hub would be tried for a minute
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    for load in (load_policy, load_tokenizer):
        with pytest.raises(ValueError, match=f"there is no model folder '{path}'"):
            load(path)


def test_a_source_is_plain_data_that_makes_the_config_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llama(rms_norm_eps=1e-3).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    policy = load_policy("./model")
    source = policy_source("./model", policy, {"revision": "v2", "token": "secret", "rope": 1})
    assert (source["model"], source["folder"]) == ("./model", str(tmp_path / "model"))
    again = LlamaConfig.from_dict(json.loads(source["config"]))
    assert again.to_json_string() == policy.config.to_json_string()
    assert again.rms_norm_eps == 1e-3
    assert source["options"] == {"revision": "v2"}  # never the token
    assert policy_source("owner/name", policy, {})["folder"] is None


def test_casts_leave_tables_as_they_are(llama: LlamaForCausalLM) -> None:
    exact = {name: buffer.clone() for name, buffer in llama.named_buffers()}
    assert exact
    with exact_buffers(llama):
        llama.to(torch.bfloat16)
    assert llama.dtype == torch.bfloat16
    for name, buffer in llama.named_buffers():
        assert torch.equal(buffer, exact[name]), name


def test_attention_and_mode_are_restored_after_the_probe(llama: LlamaForCausalLM) -> None:
    llama.train()
    before = llama.config._attn_implementation

    def fail() -> None:
        with plain_layers(llama):
            assert llama.config._attn_implementation == "eager"
            assert not llama.training
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert llama.config._attn_implementation == before == "sdpa"
    assert llama.training


@torch.no_grad()
def test_experts_of_a_probe_have_a_derivative_and_get_their_own_form_back() -> None:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
    before = model.get_experts_implementation()

    def shift(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return fwAD.make_dual(output, torch.ones_like(output))

    with plain_layers(model), fwAD.dual_level():
        hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(shift)
        tangent = fwAD.unpack_dual(model(torch.tensor([[1, 2, 3]])).logits).tangent
        hook.remove()
    assert tangent is not None
    assert tangent.abs().max() > 0
    assert model.get_experts_implementation() == before


def test_kernels_in_place_of_torch_are_put_aside_for_a_probe(llama: LlamaForCausalLM) -> None:
    @use_kernel_func_from_hub_with_fallback("sqrt", "math")
    def squared(x: float) -> float:
        return x * x

    assert squared(9.0) == 3.0  # the package's
    with plain_layers(llama):
        assert squared(9.0) == 81.0
    assert squared(9.0) == 3.0


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 128),
    ],
)
def test_frequencies_that_depend_on_the_longest_row_have_a_limit(
    rope: dict[str, object], expected: int | None
) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    assert fixed_context_length(config) == expected


def test_the_limit_of_longrope_is_the_original_context() -> None:
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    sizes = {**SIZES, "pad_token_id": 0, "eos_token_id": 1, "original_max_position_embeddings": 32}
    assert fixed_context_length(Phi3Config(**sizes, rope_parameters=rope)) == 32


def test_the_language_part_of_a_checkpoint_with_images_is_loaded(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    text = make_hybrid("Qwen3_5TextConfig").config.to_dict()
    both = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision | {"out_hidden_size": 64})
    )
    both.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    expected = both.model.language_model.state_dict()
    found = {n.removeprefix("model."): v for n, v in policy.state_dict().items()}
    assert found.keys() - expected.keys() == {"lm_head.weight"}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
