"""Forward passes of a bf16 model in fp32 see its masters, and leave it as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from logra_lightning.kl.float32_weights import float32_weights
from logra_lightning.sketch import find_targets
from logra_lightning.sketch.master import join, split
from tests.conftest import make_llama


def test_a_bf16_model_runs_in_fp32_with_its_masters() -> None:
    exact = make_llama()
    model = copy.deepcopy(exact)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    residuals = {}
    for name, module in find_targets(exact).items():
        weight, residual = split(module.weight.detach())
        twin = model.get_submodule(name)
        twin.weight.data, residuals[twin.weight] = weight, residual
    others = [name for name, _ in exact.named_parameters() if "_proj" not in name]
    for name in others:  # bf16 is all there is of these
        exact.get_parameter(name).data = model.get_parameter(name).data.to(torch.float32)
    before = {name: p.data for name, p in model.named_parameters()}
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad(), float32_weights(model, residuals.get):
        hidden = model.base_model(input_ids=tokens).last_hidden_state
    with torch.no_grad():
        expected = exact.base_model(input_ids=tokens).last_hidden_state
    assert hidden.dtype == torch.float32
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name].data_ptr()
        assert parameter.dtype == torch.bfloat16
    assert torch.equal(
        join(next(iter(residuals)).data, next(iter(residuals.values()))),
        exact.get_parameter("model.layers.0.self_attn.q_proj.weight"),
    )


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_weights_are_restored_after_an_error_inside_the_model(error: type[BaseException]) -> None:
    model = make_llama().to(torch.bfloat16)

    def fail(*_: object) -> None:
        raise error

    model.model.layers[1].mlp.up_proj.register_forward_hook(fail)
    with pytest.raises(error), float32_weights(model, lambda _: None):
        model(torch.arange(4).view(1, 4))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(model.model.layers[1].mlp.up_proj._forward_hooks) == 1
    assert not model.model.norm._forward_hooks
