"""The reserved cache holds what the growing cache of transformers holds."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaForCausalLM

from logra_lightning.engines.torch_cache import reserved_cache


@torch.no_grad()
def test_it_answers_as_the_growing_cache_also_after_rows_have_left(
    llama: LlamaForCausalLM,
) -> None:
    prompts = torch.randint(61, (3, 5))
    caches = reserved_cache(num_layers=2, max_length=9), DynamicCache(config=llama.config)
    for ids, kept in ((prompts, [0, 2]), (prompts[[0, 2], :1], [1]), (prompts[:1, :3], [0])):
        ours, theirs = (llama(ids, past_key_values=cache).logits for cache in caches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        for cache in caches:
            cache.batch_select_indices(torch.tensor(kept))
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 9


@torch.no_grad()
def test_tokens_are_added_without_moving_those_before(llama: LlamaForCausalLM) -> None:
    cache = reserved_cache(num_layers=2, max_length=6)
    places = []
    for token in range(6):
        llama(torch.tensor([[token]]), past_key_values=cache)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(set(places)) == 1
