"""The head that is read off a model gives the model's own logits, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from logra_lightning.policy.head import check_head, final_hidden, head_of
from tests.conftest import SIZES

SMALL = SIZES | {"head_dim": 12, "max_position_embeddings": 64, "pad_token_id": 0}


def model_of(config: object) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=0.05),
        CohereConfig(**SMALL, logit_scale=0.0625),
        GraniteConfig(**SMALL, logits_scaling=8.0),
    ],
    ids=lambda config: config.model_type,
)
def test_the_models_own_softcap_and_scale_are_applied(config: object) -> None:
    model = model_of(config)
    tokens = torch.arange(10)[None]
    expected = model(input_ids=tokens).logits[0]
    actual = head_of(model).logits(final_hidden(model, tokens)[0])
    torch.testing.assert_close(actual, expected)
    plain = final_hidden(model, tokens)[0] @ model.get_output_embeddings().weight.t()
    assert (plain - expected).abs().max() > 1e-3  # so that the comparison means something
    check_head(model)


def test_a_model_that_makes_its_logits_otherwise_is_refused_by_name(
    llama: LlamaForCausalLM,
) -> None:
    class Odd(LlamaForCausalLM):
        def forward(self, **kwargs):  # type: ignore[no-untyped-def]
            return CausalLMOutputWithPast(logits=super().forward(**kwargs).logits * 1.01)

    odd = Odd(llama.config).eval()
    with pytest.raises(ValueError, match="Odd makes its logits in a way that is not supported"):
        check_head(odd)


def test_padding_on_the_right_changes_nothing(llama: LlamaForCausalLM) -> None:
    tokens = torch.tensor([[5, 6, 7, 0, 0, 0]])
    torch.testing.assert_close(
        final_hidden(llama, tokens)[:, :3], final_hidden(llama, tokens[:, :3])
    )
