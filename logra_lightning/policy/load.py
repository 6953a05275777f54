"""The policy: a `transformers` causal language model and its tokenizer, made ready for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logra_lightning.hub import checked_path, hub_options, one_line_errors
from logra_lightning.sketch.targets import find_targets

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Options of `from_pretrained` that training cannot live with, and what to do instead.
_REFUSED = {
    **dict.fromkeys(
        ("quantization_config", "load_in_8bit", "load_in_4bit"),
        "quantized weights cannot be trained; start from the model that was not quantized",
    ),
    **dict.fromkeys(
        ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh"),
        "the strategy decides where weights are; set trainer.accelerator, devices and strategy",
    ),
    "gguf_file": "convert the file once, with save_pretrained, and name the folder",
    "adapter_kwargs": "merge the adapter into its model first, with peft's merge_and_unload",
    "output_loading_info": "it returns more than a model; leave it out",
    "state_dict": "name a folder with these weights in model.model",
}


def check_model_kwargs(model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for options of `from_pretrained` that cannot be honoured."""
    for name, reason in _REFUSED.items():
        if model_kwargs.get(name) is not None:
            raise ValueError(f"model.model_kwargs has {name}, which does not work here: {reason}")
    if "torch_dtype" in model_kwargs and "dtype" in model_kwargs:
        raise ValueError("model.model_kwargs has both dtype and torch_dtype: leave one out")
    given_dtype(model_kwargs)


def given_dtype(model_kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the weights that these options name; None where they name none.

    Raises:
        ValueError: it is none that can be trained.
    """
    given = model_kwargs.get("dtype", model_kwargs.get("torch_dtype"))
    name = str(given).removeprefix("torch.")
    if given is not None and name not in _DTYPES:
        raise ValueError(
            f"model.model_kwargs has dtype {name!r}, but weights are float32 or bfloat16: leave it "
            f"out, trainer.precision decides (32-true, bf16-mixed or bf16-true)"
        )
    return None if given is None else _DTYPES[name]


def load_config(path: str, **model_kwargs: Any) -> Any:
    """The `transformers` config of a model, without its weights.

    Args:
        path: folder or hub name.
        model_kwargs: options of `from_pretrained`; those that change the config do so here too.

    Raises:
        ValueError: there is no such model, or it is an adapter or a quantized model.
    """
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    options = {name: v for name, v in model_kwargs.items() if name not in ("dtype", "torch_dtype")}
    full, hub = checked_path(path), hub_options(model_kwargs)
    # Where peft is installed, `transformers` would load its model and put it on top.
    found = {name: value for name, value in hub.items() if name not in _NOT_FOR_ADAPTERS}
    if find_adapter_config_file(full, **found):
        raise ValueError(
            f"the model {path!r} is an adapter: merge it into its model first (peft's "
            f"merge_and_unload, then save_pretrained) and name that folder"
        )
    with one_line_errors(path):
        config, _ = AutoConfig.from_pretrained(full, return_unused_kwargs=True, **options)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"the model {path!r} is quantized, and quantized weights cannot be trained: start from "
            f"the model that was not quantized"
        )
    return config


# Options that `find_adapter_config_file` does not take.
_NOT_FOR_ADAPTERS = ("code_revision", "trust_remote_code", "force_download")


def load_policy(path: str, **model_kwargs: Any) -> nn.Module:
    """A causal language model without dropout, in torch's default dtype unless another is given.

    Logprobs are functions of the weights; dropout would make them noisy. The model is left in
    training mode, the only one in which `transformers` checkpoints activations.

    Args:
        path: folder or hub name.
        model_kwargs: passed to `from_pretrained`.

    Raises:
        ValueError: there is no such model, or it cannot be trained.
    """
    from transformers import AutoModelForCausalLM

    check_model_kwargs(model_kwargs)
    load_config(path, **model_kwargs)
    options = {name: v for name, v in model_kwargs.items() if name not in ("dtype", "torch_dtype")}
    dtype = given_dtype(model_kwargs) or torch.get_default_dtype()
    with one_line_errors(path):
        policy = AutoModelForCausalLM.from_pretrained(checked_path(path), dtype=dtype, **options)
    return _without_dropout(policy)


def policy_without_weights(path: str, **model_kwargs: Any) -> nn.Module:
    """The model that `load_policy` gives, with all weights and buffers on the meta device.

    Its config is read, its weights are not. It has no generation config of its own yet.

    Args:
        path: folder or hub name.
        model_kwargs: as for `load_policy`.

    Raises:
        ValueError: there is no such model, or it cannot be built without its weights.
    """
    from transformers import AutoModelForCausalLM, initialization
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    check_model_kwargs(model_kwargs)
    config, hub = load_config(path, **model_kwargs), hub_options(model_kwargs)
    names = ("attn_implementation", "experts_implementation")
    options = {name: model_kwargs[name] for name in names if name in model_kwargs}
    options["dtype"] = given_dtype(model_kwargs) or torch.get_default_dtype()
    trusted = hub.pop("trust_remote_code", False)
    own_code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    # What from_pretrained builds models in too, for those that compute with a value they made.
    computing = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    with one_line_errors(path), torch.device("meta"), computing():
        if own_code and trusted:  # from_config would take the code of the default revision
            made_by = get_class_from_dynamic_module(own_code, checked_path(path), **hub)
            policy = made_by._from_config(config, **options)
        else:
            policy = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, **options)
    return _without_dropout(policy)


def _without_dropout(policy: nn.Module) -> nn.Module:
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return policy.train()


def policy_source(path: str, policy: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data for checkpoints: what an export needs beside the weights, or where it is.

    Args:
        path: folder or hub name that the policy was loaded from.
        policy: the `transformers` model that was loaded from there.
        model_kwargs: the options that it was loaded with.

    Returns:
        `model` (as given), `folder` (in full; None for a hub name), `options` (those that hold for
        the tokenizer too, without the access token), and `config` and `generation_config` in JSON.
    """
    folder = Path(path).expanduser()
    options = {name: v for name, v in hub_options(model_kwargs).items() if name != "token"}
    return {
        "model": path,
        "folder": str(folder.resolve()) if folder.is_dir() else None,
        "options": options,
        "config": policy.config.to_json_string(),
        "generation_config": policy.generation_config.to_json_string(),
    }


def checkpoint_activations_(policy: Any) -> None:
    """Keep only the inputs of each layer and compute the rest again in backward."""
    options = {"use_reentrant": False}  # the other kind gives no gradient below frozen embeddings
    if hasattr(policy, "activation_checkpointing_enable"):
        policy.activation_checkpointing_enable(options)
    else:  # transformers before 5.2x
        policy.gradient_checkpointing_enable(options)


@contextmanager
def exact_buffers(model: nn.Module) -> Iterator[None]:
    """Let buffers keep their dtype when the model is cast.

    They hold tables such as rotary frequencies: rounded to bf16, positions of a few thousand turn
    by several radians too much or too little.
    """
    before = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for module, name, buffer in before:
        now = getattr(module, name)
        if now.dtype != buffer.dtype:
            setattr(module, name, buffer.to(now.device))


@contextmanager
def plain_layers(policy: Any) -> Iterator[None]:
    """Layers whose derivative is known in forward mode, and no checkpointing of activations.

    Attention and experts are the eager ones of `transformers`; layers that carry a state run as
    plain torch where a package of kernels (flash-linear-attention, causal-conv1d, mamba-ssm) would
    take their place.
    """
    from transformers.integrations import hub_kernels

    was_training, config = policy.training, policy.config
    attention, experts = config._attn_implementation, policy.get_experts_implementation()
    exporting = hub_kernels.is_torchdynamo_exporting
    policy.eval()
    policy.set_attn_implementation("eager")
    if experts is not None:
        policy.set_experts_implementation("eager")
    # An export asks for the torch form of each kernel, and so does this.
    hub_kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = exporting
        if experts is not None:
            policy.set_experts_implementation(experts)
        policy.set_attn_implementation(attention)
        policy.train(was_training)


def freeze_(
    policy: nn.Module,
    targets: Sequence[str] | None,
    *,
    train_others: bool,
    option: str = "trainer.strategy.init_args.targets",
) -> None:
    """Let only the targets' weights have a gradient, or all weights with `train_others`.

    Args:
        policy: changed in place.
        targets: names of the layers to train, by their last part, such as `q_proj`; None for those
            that `find_targets` takes by default.
        train_others: leave a gradient to all other weights too.
        option: the option that sets `targets`, for error messages.
    """
    found = find_targets(policy, targets, option=option)
    trained = {id(module.weight) for module in found.values()}
    for param in policy.parameters():
        param.requires_grad_(train_others or id(param) in trained)


def stop_token_ids(policy: Any, tokenizer: Any) -> list[int]:
    """The model's end-of-sequence tokens; nothing else is taken from its generation config."""
    stops = getattr(policy.generation_config, "eos_token_id", None)
    found = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


def fixed_context_length(config: Any) -> int | None:
    """The number of tokens up to which a token's logprob does not depend on the rows beside it.

    Beyond the original context, `longrope` and `dynamic` choose the rotary frequencies by the
    longest row of a batch. None for models whose frequencies are fixed.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    limits = [
        kind.get("original_max_position_embeddings") or text.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def context_length(config: Any) -> int:
    """The number of tokens that a model with this `transformers` config can read at most."""
    return config.get_text_config().max_position_embeddings
