"""Small models of several families, probes of a few tokens, and random changes of the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from logra_lightning.kl import KLProbe
from logra_lightning.kl.inject import Change
from logra_lightning.policy.head import final_hidden, head_of
from logra_lightning.policy.load import plain_layers
from logra_lightning.sketch import SketchBank, find_targets
from logra_lightning.sketch.bank import SketchedLayer

CPU = torch.device("cpu")
RANK = 8

FAMILIES = [
    "LlamaConfig",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "GemmaConfig",
    "Gemma2Config",
    "Gemma3TextConfig",
    "Phi3Config",
]


def make_model(config: str = "LlamaConfig", **options: Any) -> Any:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if "Gemma" in config or config == "Qwen3Config":
        sizes["head_dim"] = 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, config)(**(sizes | options))
        model = transformers.AutoModelForCausalLM.from_config(made).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_probe(model: Any, temperature: float = 1.0) -> KLProbe:
    head = head_of(model)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 60, (2, length), generator=generator) for length in (9, 14)]

    def forward(tokens: Tensor) -> Tensor:
        return final_hidden(model, tokens)[:, 3:].flatten(0, 1)

    return KLProbe(
        model,
        [partial(forward, tokens) for tokens in batches],
        lambda hidden: head.logits(hidden).double() / temperature,
        partial(plain_layers, model),
    )


def change(layer: SketchedLayer, direction: Tensor, rate: float) -> Change:
    return Change(layer, lambda: direction, rate)


def make_changes(model: nn.Module, size: float = 0.05, rate: float = 0.0) -> list[Change]:
    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    targets = [leaf for leaf in leaves if leaf.endswith("_proj")]
    sketches = SketchBank(find_targets(model, sorted(targets)), RANK, device=CPU)
    sketches.begin_step(0)
    generator = torch.Generator().manual_seed(2)
    return [
        change(s, torch.randn(s.module.out_features, RANK, generator=generator) * size, rate)
        for s in sketches
    ]


def scaled(changes: list[Change], a: float) -> list[Change]:
    return [change(c.layer, c.direction() * a, c.rate * a) for c in changes]


def mean(total: Tensor) -> float:
    return (total[0] / total[1]).item()
