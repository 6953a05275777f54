"""Tiny random hybrids: models that mix attention with layers that carry a state."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5TextConfig": _DELTA_NET,
    "Qwen3NextConfig": _DELTA_NET | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "FalconH1Config": _MAMBA,
}
# vLLM's kernel for CPUs takes heads of 128, in bf16.
WIDE: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


def make_hybrid(config: str, **options: Any) -> nn.Module:
    """A causal language model of four layers with random weights, also where they start as one."""
    made = getattr(transformers, config)(**(_SIZES | HYBRIDS[config] | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = transformers.AutoModelForCausalLM.from_config(made).eval()
        for parameter in policy.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return policy
