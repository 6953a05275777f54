"""The probe's tokens are the completions', and its logits the model's at the temperature."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from logra_lightning.rollout.probe import rollout_probe
from logra_lightning.types import Completion, Rollouts


def test_states_and_logits_are_those_before_each_completion_token(llama: LlamaForCausalLM) -> None:
    prompts, sizes = [[3, 4, 5], [6, 7]], [2, 4]
    completions = [
        Completion([10 + i for i in range(n)], torch.zeros(n), truncated=False) for n in sizes
    ]
    zeros = torch.zeros(2)
    rollouts = Rollouts(prompts, completions, zeros, {}, zeros, 6)
    probe = rollout_probe(
        llama,
        rollouts,
        temperature=0.5,
        device=torch.device("cpu"),
        mismatch=0.25,
    )
    assert probe.mismatch == 0.25
    (hidden,) = probe.hidden()
    assert hidden.shape[0] == sum(sizes)
    with torch.no_grad():
        found = torch.log_softmax(probe.logits(hidden), dim=-1)
        rows = []
        for row in (0, 1):  # each has six or five tokens; the longest comes first
            tokens = torch.tensor([prompts[row] + completions[row].token_ids])
            first = len(prompts[row]) - 1
            rows.append(llama(tokens).logits[0, first:-1] / 0.5)
        expected = torch.log_softmax(torch.cat([rows[1], rows[0]]), dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_without_rollouts_has_a_probe_without_tokens(llama: LlamaForCausalLM) -> None:
    none = Rollouts([], [], torch.zeros(0), {}, torch.zeros(0), 0)
    probe = rollout_probe(llama, none, temperature=1.0, device=torch.device("cpu"), together=True)
    assert probe.hidden() == []
