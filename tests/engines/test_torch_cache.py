"""The reserved cache holds what the growing cache of transformers holds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from logra_lightning.engines.torch_cache import reserved_cache, select_rows
from tests.hybrids import HYBRIDS, make_hybrid


@torch.no_grad()
def test_it_answers_as_the_growing_cache_also_after_rows_have_left(
    llama: LlamaForCausalLM,
) -> None:
    prompts = torch.randint(61, (3, 5))
    caches = reserved_cache(llama.config, max_length=9), DynamicCache(config=llama.config)
    for ids, kept in ((prompts, [0, 2]), (prompts[[0, 2], :1], [1]), (prompts[:1, :3], [0])):
        ours, theirs = (llama(ids, past_key_values=cache).logits for cache in caches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        for cache in caches:
            cache.batch_select_indices(torch.tensor(kept))
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 9


@torch.no_grad()
def test_tokens_are_added_without_moving_those_before(llama: LlamaForCausalLM) -> None:
    cache = reserved_cache(llama.config, max_length=6)
    places = []
    for token in range(6):
        llama(torch.tensor([[token]]), past_key_values=cache)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(set(places)) == 1


@pytest.mark.parametrize("config", HYBRIDS)
@torch.no_grad()
def test_rows_of_a_hybrid_that_are_kept_go_on_as_if_alone(config: str) -> None:
    policy = make_hybrid(config)
    prompts, token = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[9]])
    cache = reserved_cache(policy.config, max_length=4)
    policy(prompts, past_key_values=cache, use_cache=True)
    select_rows(cache, torch.tensor([1, 1]))
    found = policy(token.expand(2, 1), past_key_values=cache, use_cache=True).logits[:, -1]
    expected = policy(torch.cat([prompts[1:], token], dim=1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, expected.expand(2, -1), rtol=0, atol=1e-5)
