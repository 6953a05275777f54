"""`Engine`: what samples completions from the policy. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from logra_lightning.types import Completion, SamplingParams


class Engine(Protocol):
    """What the module and the callbacks ask of an engine; the module owns it."""

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """Make ready to sample from `policy`; called before the first `generate`.

        Args:
            policy: the `transformers` model that is being trained.
            stop_token_ids: a completion ends with any of these.
        """
        ...

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        num_completions: int,
        seed: int,
    ) -> list[list[Completion]]:
        """`num_completions` completions for each prompt, in the order of the prompts.

        Args:
            prompt_ids: P lists of token ids.
            sampling: how to draw.
            num_completions: G; 1 when the temperature is 0.
            seed: everything random derives from it; the global random state is left alone.
        """
        ...

    def close(self) -> None:
        """Free what `start` took."""
        ...
