"""The reference computes what the policy computed at the start, whatever became of it since."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from logra_lightning.policy.reference import Reference

IDS = torch.tensor([[3, 5, 7, 11]])


def test_it_computes_with_the_first_weights_and_gives_the_newest_back(
    llama: LlamaForCausalLM,
) -> None:
    llama.lm_head.weight.requires_grad_(False)
    with torch.no_grad():
        first = llama(IDS).logits
        reference = Reference(llama)
        for param in llama.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
        now = {name: value.clone() for name, value in llama.state_dict().items()}
        changed = llama(IDS).logits
    assert not torch.equal(changed, first)
    for _ in range(2):  # the first time moves the copies to the policy's device
        with reference.weights():
            logits = llama(IDS).logits
        assert torch.equal(logits, first)
        assert not logits.requires_grad
        torch.testing.assert_close(llama.state_dict(), now, rtol=0, atol=0)
    assert llama(IDS).logits.requires_grad


def test_the_newest_weights_come_back_after_an_error_too(llama: LlamaForCausalLM) -> None:
    reference = Reference(llama)
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    now = llama.lm_head.weight.detach().clone()

    def fail() -> None:
        with reference.weights():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.equal(llama.lm_head.weight, now)


def test_only_weights_that_train_are_copied(llama: LlamaForCausalLM) -> None:
    llama.requires_grad_(False)
    llama.lm_head.weight.requires_grad_(True)
    assert f"{61 * 48 * 4:,} bytes for the weights that train" in str(Reference(llama))
