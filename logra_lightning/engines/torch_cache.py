"""`reserved_cache`: keys and values in memory taken once. `TorchEngine` imports it when it samples.

Importing this file imports `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


def reserved_cache(num_layers: int, max_length: int) -> Cache:
    """A cache of `transformers` with room for `max_length` tokens in each of its layers."""
    return Cache(layers=[_ReservedLayer(max_length) for _ in range(num_layers)])


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
