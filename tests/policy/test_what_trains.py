"""One line says which weights are sketched, trained densely and frozen."""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM

from logra_lightning.policy import what_trains
from logra_lightning.policy.load import freeze_
from logra_lightning.sketch import find_targets


def sizes(model: nn.Module, *parts: str) -> int:
    found = [p.numel() for n, p in model.named_parameters() if any(part in n for part in parts)]
    assert found
    return sum(found)


def test_shares_are_those_of_the_weights_and_kinds_stand_in_the_order_of_the_model(
    llama: LlamaForCausalLM,
) -> None:
    freeze_(llama, None, train_others=False)
    layers = list(find_targets(llama).values())
    for layer in layers:
        layer.weight.requires_grad_(False)  # as a sketching strategy does
    total = sum(p.numel() for p in llama.parameters())
    share = sizes(llama, "_proj.") / total
    kinds = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert what_trains(llama, layers) == (
        f"trains: {share:.1%} of {total / 1000:.1f}K weights sketched ({kinds}), 0% dense, "
        f"{1 - share:.1%} frozen (embed_tokens, norms, lm_head)"
    )


def test_a_dense_run_sketches_nothing(llama: LlamaForCausalLM) -> None:
    freeze_(llama, ["q_proj"], train_others=False)
    told = what_trains(llama, [])
    total = sum(p.numel() for p in llama.parameters())
    assert f"0% of {total / 1000:.1f}K weights sketched, " in told
    assert f"{sizes(llama, 'q_proj') / total:.1%} dense (q_proj), " in told


def test_biases_and_weights_outside_of_layers_have_names() -> None:
    model = nn.Module()
    model.layer = nn.Linear(300, 400)
    model.experts = nn.Parameter(model.layer.weight.detach().clone())
    assert what_trains(model, [model.layer]) == (
        "trains: 49.9% of 240.4K weights sketched (layer), 50.1% dense (experts, biases), 0% frozen"
    )
