"""The sketch of a backward pass equals the dense gradient times A^T, which never exists."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from logra_lightning.policy.load import checkpoint_activations_
from logra_lightning.sketch import (
    SketchBank,
    SketchCapture,
    find_targets,
)
from tests.conftest import Pair, make_llama

CPU = torch.device("cpu")


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
    )


def tokens_of(rows: int, seed: int = 3) -> Tensor:
    return torch.randint(0, 61, (rows, 11), generator=torch.Generator().manual_seed(seed))


def dense_gradients(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    loss_of(model, tokens).backward()
    return {name: m.weight.grad for name, m in find_targets(model).items()}  # type: ignore[misc]


def sketching(
    model: LlamaForCausalLM, rank: int = 16, projection: str = "rademacher"
) -> tuple[SketchBank, SketchCapture]:
    modules = find_targets(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sketches = SketchBank(modules, rank, seed=5, projection=projection, device=CPU)
    sketches.begin_step(2)
    return sketches, SketchCapture(sketches)


def assert_sketches_are(
    sketches: SketchBank, gradients: dict[str, Tensor], tolerance: float
) -> None:
    for layer in sketches:
        a = layer.entries.to(torch.float64) / sketches.rank**0.5
        expected = gradients[layer.name].to(torch.float64) @ a.t()
        error = (layer.sketch.to(torch.float64) - expected).abs().max() / expected.abs().max()
        assert error < tolerance, layer.name


@pytest.mark.parametrize("projection", ["rademacher", "gaussian"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sketch_is_the_dense_gradient_times_the_projection(
    llama: LlamaForCausalLM, projection: str, microbatches: int, checkpointing: bool
) -> None:
    tokens = tokens_of(6)
    gradients = dense_gradients(llama, tokens)
    sketches, _ = sketching(llama, projection=projection)
    if checkpointing:
        llama.train()
        checkpoint_activations_(llama)
    for part in tokens.chunk(microbatches):
        loss_of(llama, part).backward()
    assert_sketches_are(sketches, gradients, 1e-5)
    assert all(p.grad is None for p in llama.parameters())


def test_sketch_in_bf16_is_within_rounding(llama: LlamaForCausalLM) -> None:
    tokens = tokens_of(6)
    gradients = dense_gradients(llama, tokens)
    sketches, _ = sketching(llama.to(torch.bfloat16))
    loss_of(llama, tokens).backward()
    # bf16 keeps 8 bits: a few percent after a forward and backward pass of two layers.
    assert_sketches_are(sketches, gradients, 0.1)
    assert sketches.flat.dtype == torch.float32


def test_sketch_under_autocast_is_within_rounding(llama: LlamaForCausalLM) -> None:
    tokens = tokens_of(6)
    gradients = dense_gradients(llama, tokens)
    sketches, _ = sketching(llama)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(llama, tokens)
    loss.backward()
    assert_sketches_are(sketches, gradients, 0.1)


def test_only_the_projected_input_is_kept(pair: Pair) -> None:
    pair.requires_grad_(False)
    sketches = SketchBank(find_targets(pair, ["q_proj"]), 2, device=CPU)
    sketches.begin_step(0)
    SketchCapture(sketches)
    saved: list[tuple[int, ...]] = []
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        pair.q_proj(x)
    assert saved == [(5, 2)]  # X A^T, and not X [5, 12]; the first layer does not even need W


def test_checkpointing_keeps_no_projected_input_of_the_first_forward(
    llama: LlamaForCausalLM,
) -> None:
    _sketches, _ = sketching(llama, rank=13)
    llama.train()
    checkpoint_activations_(llama)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        loss_of(llama, tokens_of(2))
    assert kept
    assert all(13 not in shape for shape in kept)


def test_state_dict_and_outputs_do_not_change(llama: LlamaForCausalLM) -> None:
    tokens = tokens_of(2)
    before, names = loss_of(llama, tokens), list(llama.state_dict())
    _, capture = sketching(llama)
    assert list(llama.state_dict()) == names
    assert torch.equal(loss_of(llama, tokens), before)
    capture.remove()
    assert not loss_of(llama, tokens).requires_grad


def test_no_gradient_no_sketch(llama: LlamaForCausalLM) -> None:
    sketches, _ = sketching(llama)
    with torch.no_grad():
        loss_of(llama, tokens_of(2))
    assert (sketches.flat == 0).all()


def test_forward_before_the_first_step_says_what_is_missing(pair: Pair) -> None:
    sketches = SketchBank(find_targets(pair, ["q_proj"]), 2, device=CPU)
    SketchCapture(sketches)
    with pytest.raises(RuntimeError, match="add the SketchAccumulation callback"):
        pair(torch.zeros(1, 12))


def test_what_follows_may_change_the_output_in_place_and_inputs_may_have_names() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 12, generator=generator)
    layers = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(12, 9)})
    torch.nn.init.normal_(layers["up_proj"].weight, generator=generator)
    dense = copy.deepcopy(layers["up_proj"])
    torch.relu_(dense(x)).square().sum().backward()
    layers.requires_grad_(False)
    sketches = SketchBank(find_targets(layers, ["up_proj"]), 5, device=CPU)
    sketches.begin_step(0)
    SketchCapture(sketches)
    torch.relu_(layers["up_proj"](input=x)).square().sum().backward()
    assert_sketches_are(sketches, {"up_proj": dense.weight.grad}, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gaussian_entries_are_not_rounded(dtype: torch.dtype) -> None:
    layers = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 4, bias=False, dtype=dtype)})
    layers.requires_grad_(False)
    sketches = SketchBank(find_targets(layers, ["up_proj"]), 8, projection="gaussian", device=CPU)
    sketches.begin_step(0)
    SketchCapture(sketches)
    x = torch.eye(64, dtype=dtype)  # so that X A^T is A^T itself
    layers["up_proj"](x)[:, 0].sum().backward()
    row = sketches["up_proj"].total[0]
    torch.testing.assert_close(row, sketches["up_proj"].entries.sum(dim=1), rtol=1e-5, atol=1e-5)


def test_head_and_embeddings_may_train_densely_beside_sketches() -> None:
    model = make_llama(tie_word_embeddings=True)
    tokens = tokens_of(4)
    reference = copy.deepcopy(model)
    loss_of(reference, tokens).backward()
    sketches, _ = sketching(model)
    model.model.embed_tokens.weight.requires_grad_(True)
    loss_of(model, tokens).backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad, reference.model.embed_tokens.weight.grad
    )
    assert_sketches_are(
        sketches, {n: m.weight.grad for n, m in find_targets(reference).items()}, 1e-5
    )
