"""The policy: a `transformers` causal language model and its tokenizer, made ready for training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logra_lightning.sketch.bank import find_targets
from logra_lightning.tokenizer import checked_path


def load_policy(path: str, **kwargs: Any) -> nn.Module:
    """A causal language model in torch's default dtype, without dropout.

    Logprobs are functions of the weights; dropout would make them noisy. The model is left in
    training mode, the only one in which `transformers` checkpoints activations.

    Args:
        path: folder or hub name.
        kwargs: passed to `from_pretrained`.

    Raises:
        ValueError: `path` looks like a folder that is not there.
    """
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.get_default_dtype()} | kwargs
    policy = AutoModelForCausalLM.from_pretrained(checked_path(path), **options)
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return policy.train()


def policy_source(path: str, policy: Any) -> dict[str, Any]:
    """Plain data for checkpoints: what an export needs beside the weights, or where it is.

    Args:
        path: folder or hub name that the policy was loaded from.
        policy: the `transformers` model that was loaded from there.

    Returns:
        `model` (as given), `folder` (in full; None for a hub name), and `config` and
        `generation_config` in JSON.
    """
    folder = Path(path).expanduser()
    return {
        "model": path,
        "folder": str(folder.resolve()) if folder.is_dir() else None,
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
def plain_attention(policy: Any) -> Iterator[None]:
    """Attention whose derivative is known in forward mode, and no checkpointing of activations."""
    was_training, before = policy.training, policy.config._attn_implementation
    policy.eval()
    policy.set_attn_implementation("eager")
    try:
        yield
    finally:
        policy.set_attn_implementation(before)
        policy.train(was_training)


def freeze_(policy: nn.Module, targets: Sequence[str], *, train_others: bool) -> None:
    """Let only the targets' weights have a gradient, or all weights with `train_others`.

    Args:
        policy: changed in place.
        targets: names of the layers to train, by their last part, such as `q_proj`.
        train_others: leave a gradient to all other weights too.
    """
    trained = {id(module.weight) for module in find_targets(policy, targets).values()}
    for param in policy.parameters():
        param.requires_grad_(train_others or id(param) in trained)


def stop_token_ids(policy: Any, tokenizer: Any) -> list[int]:
    """The model's end-of-sequence tokens; nothing else is taken from its generation config."""
    stops = getattr(policy.generation_config, "eos_token_id", None)
    found = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


def context_length(policy: Any) -> int:
    """The number of tokens that the model can read at most."""
    return policy.config.get_text_config().max_position_embeddings
