"""Logprobs of microbatches are those of plain forward passes, in the order of the rollouts."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import LlamaForCausalLM

from logra_lightning.policy.logprobs import completion_logprobs, microbatch_logprobs
from logra_lightning.rollout import pack
from logra_lightning.types import Completion, Microbatch, Rollouts

PROMPTS, SIZES = [[3, 4, 5], [6, 7], [8]], [2, 5, 3]


def rollouts() -> Rollouts:
    completions = [Completion([10 + i for i in range(n)], torch.zeros(n), False) for n in SIZES]
    return Rollouts(PROMPTS, completions, torch.zeros(3), {}, torch.zeros(3))


def test_each_completion_has_the_logprobs_of_a_plain_pass(llama: LlamaForCausalLM) -> None:
    batch = rollouts()
    cpu = torch.device("cpu")
    microbatches = list(pack(batch, 14, temperature=0.5, device=cpu))
    assert len(microbatches) == 2
    empty = torch.zeros(0)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    microbatches.append(Microbatch(tokens, tokens.bool(), empty, empty, 0.5, empty, 10))
    entropies: list[torch.Tensor] = []

    def logprobs_of(microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        found = microbatch_logprobs(llama, microbatch, chunk_tokens=3, entropy_gradient=False)
        entropies.append(found[1])
        return found

    found = completion_logprobs(microbatches, logprobs_of, 3)
    assert [len(part) for part in found] == SIZES
    expected_entropies = []
    for prompt, completion, logprobs in zip(PROMPTS, batch.completions, found, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = llama(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.5
        expected = torch.log_softmax(logits, dim=-1)
        expected_entropies.append(-(expected.exp() * expected).sum(dim=-1))
        drawn = expected.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(logprobs, drawn, rtol=1e-4, atol=1e-5)
    order = [i for microbatch in microbatches for i in microbatch.rollouts]
    torch.testing.assert_close(
        torch.cat(entropies),
        torch.cat([expected_entropies[i] for i in order]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_no_logprob_depends_on_what_fills_the_rows(llama: LlamaForCausalLM) -> None:
    (microbatch,) = pack(rollouts(), 100, temperature=1.0, device=torch.device("cpu"))
    sizes = torch.tensor([len(PROMPTS[i]) + SIZES[i] for i in microbatch.rollouts])
    filler = torch.arange(microbatch.input_ids.shape[1]) >= sizes[:, None]
    assert filler.any()
    found = [
        microbatch_logprobs(
            llama,
            replace(microbatch, input_ids=microbatch.input_ids.masked_fill(filler, token)),
            chunk_tokens=100,
            entropy_gradient=False,
        )
        for token in (0, 60)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
