"""Gradients and KL of a small model of random weights, against fp64 and fp32."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from logra_lightning.kl.float32_weights import exact_forwards
from logra_lightning.kl.step_kl import StepKL, TangentKL
from logra_lightning.optim import Proposal
from logra_lightning.policy import checkpoint_activations_
from logra_lightning.rollout import rollout_probe
from logra_lightning.sketch import SketchBank, SketchCapture, find_targets
from logra_lightning.types import Completion, Rollouts

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def small_llama(report: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, vocabulary = (64, 2, 61) if report.quick else (512, 4, 4096)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():  # logits that are not flat
            parameter.data.add_(torch.randn_like(parameter) * 0.8 / width**0.5)
    return model.to(report.device)


def in_precision(model: Any, precision: str, device: torch.device) -> tuple[Any, Any]:
    """A copy of the model, and what makes the context to call it in."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    mixed = partial(torch.autocast, device.type, torch.bfloat16)
    return copy.deepcopy(model).to(dtype), mixed if precision == "bf16-mixed" else nullcontext


def capture(report: Any) -> None:
    """The sketch of a backward pass is the dense gradient in fp64 times the projection."""
    llama = small_llama(report)
    rows, length, rank = (2, 12, 16) if report.quick else (4, 256, 128)
    generator = torch.Generator().manual_seed(1)
    vocabulary = llama.config.vocab_size
    tokens = torch.randint(vocabulary, (rows, length), generator=generator).to(report.device)

    def backward(model: Any, context: Any) -> None:
        with context():
            logits = model(input_ids=tokens, use_cache=False).logits
            logits = logits[:, :-1].flatten(0, 1)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()

    for precision in PRECISIONS:
        for checkpointing in (False, True):
            name = precision + (" checkpointed" if checkpointing else "")
            with report.part(name):
                model, context = in_precision(llama, precision, report.device)
                dense = copy.deepcopy(model).double()
                backward(dense, nullcontext)
                gradients = {n: m.weight.grad for n, m in find_targets(dense).items()}
                modules = find_targets(model.requires_grad_(False))
                if checkpointing:
                    checkpoint_activations_(model.train())
                sketches = SketchBank(modules, rank, device=report.device)
                sketches.begin_step(0)
                SketchCapture(sketches)
                backward(model, context)
                errors = {}
                for layer in sketches:
                    exact = gradients[layer.name] @ layer.projection.double().t()
                    errors[layer.name] = ((layer.sketch - exact).norm() / exact.norm()).item()
                worst = max(errors, key=lambda n: errors[n])
                report.figures[name] = errors[worst]
                bound = 1e-4 if precision == "32-true" else 0.1
                report.need(errors[worst] < bound, f"{name}: {errors[worst]:.1e} off in {worst}")


def kl(report: Any) -> None:
    """The KL of a step by derivatives in the policy's precision is that of fp32, at any size."""
    llama = small_llama(report)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, llama.config.vocab_size, (8, 24), generator=generator).tolist()
    completions = [Completion(ids[8:], torch.zeros(16), truncated=True) for ids in tokens]
    zeros = torch.zeros(len(tokens))
    rollouts = Rollouts([ids[:8] for ids in tokens], completions, zeros, {}, zeros)
    sizes = (2e-5, 2e-3) if report.quick else (2e-6, 2e-5, 2e-4, 2e-3, 2e-2, 1e-1)
    for precision in PRECISIONS:
        with report.part(precision):
            model, context = in_precision(llama, precision, report.device)
            model.requires_grad_(False)
            sketches = SketchBank(find_targets(model), 8, device=report.device)
            sketches.begin_step(0)
            sketches.flat.copy_(torch.randn(sketches.flat.shape, generator=generator))
            rows = {s.name: s.module.out_features for s in sketches}
            scales = {
                name: torch.full((n,), 0.05, dtype=torch.float64, device=report.device)
                for name, n in rows.items()
            }
            proposal = Proposal(scales, {}, 0.0, 1.0)
            probe = rollout_probe(model, rollouts, temperature=0.8, device=report.device)
            ours, oracle = (kind(probe, proposal, sketches) for kind in (TangentKL, StepKL))
            with probe.prepared(), context():
                q = ours.predict()
            with exact_forwards(probe, lambda _: None):
                ratios = {"predicted": q / oracle.predict()}
            for size in sizes:
                scale = (size / q) ** 0.5
                with probe.prepared(), context():
                    measured = ours.measure(scale)
                with exact_forwards(probe, lambda _: None):
                    ratios[f"{size:.0e}"] = measured / oracle.measure(scale)
            report.figures[precision] = ratios
            for size, ratio in ratios.items():
                bound = 0.12 if size == "1e-01" else 0.05
                report.need(abs(ratio - 1) < bound, f"{precision}, {size}: {ratio:.3f} of fp32's")
