"""The cache of a model that samples: keys and values in memory taken once, states as they are.

`TorchEngine` imports this file when it samples. Importing it imports `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer


def reserved_cache(config: Any, max_length: int) -> Cache:
    """A cache of `transformers` with room for `max_length` tokens in each layer that attends.

    Layers with a state in place of keys (linear attention, Mamba) are those that `transformers`
    makes for the config.

    Args:
        config: the model's config.
        max_length: number of tokens of the longest prompt and its completion.
    """
    layers = DynamicCache(config=config).layers
    has_state = [isinstance(layer, LinearAttentionLayer) for layer in layers]
    if not any(has_state):  # some configs tell fewer layers than the model asks for
        number = config.get_text_config().num_hidden_layers
        return Cache(layers=[_ReservedLayer(max_length) for _ in range(number)])
    kept = zip(layers, has_state, strict=True)
    return Cache(layers=[layer if state else _ReservedLayer(max_length) for layer, state in kept])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep these rows of a cache, in this order and as often as each is named.

    Args:
        cache: changed in place.
        rows: [n] int64 indices.
    """
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.reorder_cache(rows)
        else:
            layer.batch_select_indices(rows)


class _ReservedLayer(DynamicLayer):
    """Keys and values of one layer, in memory that is taken once.

    The layer of transformers grows by `cat`, which copies everything at each token.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = self._reserve(key_states)
            self.values = self._reserve(value_states)
        assert self.keys is not None
        assert self.values is not None
        start, self._length = self._length, self._length + key_states.shape[-2]
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def _reserve(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:2], self._max_length, states.shape[-1])
        return torch.empty(shape, dtype=states.dtype, device=states.device)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys[indices], self.values[indices]
