"""A tiny policy with a vLLM engine for it, and the trainer's side of updates, for several tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.sketch import Factors, find_targets, merge_
from logra_lightning.sketch.master import split
from logra_lightning.types import Completion, SamplingParams
from tests.conftest import make_llama

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
        """All weights, those of targets with their masters unless `exact` is false."""
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
