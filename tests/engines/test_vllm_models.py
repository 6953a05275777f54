"""The families of models that VLLMEngine serves, each as a random tiny one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.types import SamplingParams

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
SLOW = [pytest.mark.slow]  # vLLM takes ten seconds to look at an architecture for the first time
CONFIGS = [
    pytest.param("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    pytest.param("Phi3Config", {"pad_token_id": 0}),
    pytest.param("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 32}, marks=SLOW),
    pytest.param("Qwen2Config", {}, marks=SLOW),
    pytest.param("GemmaConfig", {"head_dim": 32}, marks=SLOW),
    pytest.param("Gemma3TextConfig", {"head_dim": 32}, marks=SLOW),
    pytest.param("MistralConfig", {}, marks=SLOW),
]


@pytest.mark.parametrize(("config", "options"), CONFIGS)
def test_engine_and_trainer_agree(config: str, options: dict[str, Any]) -> None:
    made = getattr(transformers, config)(**(SIZES | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = transformers.AutoModelForCausalLM.from_config(made).eval()
        for parameter in policy.parameters():  # biases and norms that are not zero or one
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    engine = VLLMEngine(kv_cache_memory_bytes=1 << 24)
    engine.start(policy, [1])
    try:
        weights = (PolicyWeight(name, p.data) for name, p in policy.named_parameters())
        assert engine.differing(weights) == []
        prompt = [3, 4, 5, 6]
        group = engine.generate([prompt], SamplingParams(8), num_completions=6, seed=3)[0]
        for completion in group:
            with torch.no_grad():
                logits = policy(torch.tensor([prompt + completion.token_ids])).logits[0, 3:-1]
            drawn = torch.tensor(completion.token_ids)[:, None]
            expected = torch.log_softmax(logits, dim=-1).gather(1, drawn)[:, 0]
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-4)
    finally:
        engine.close()
