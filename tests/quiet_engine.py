"""An engine with nothing to start or close, for tests that script what it generates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class QuietEngine:
    """The `Engine` protocol without `generate`, which a subclass adds."""

    policy_version = None
    max_model_len = None

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...
