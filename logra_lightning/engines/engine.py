"""`Engine`: what samples completions from the policy. Token ids in, token ids out.

`SyncedEngine` is one that holds weights of its own, which someone must keep up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from logra_lightning.engines.weights import PolicyWeight
from logra_lightning.sketch import Factors
from logra_lightning.types import Completion, SamplingParams


class Engine(Protocol):
    """What the module and the callbacks ask of an engine; the module owns it.

    Attributes:
        policy_version: optimizer steps behind the weights that it samples from; None where it
            samples from the very weights that are trained.
        max_model_len: most tokens of prompt and completion together; None where only the model
            limits them.
    """

    policy_version: int | None
    max_model_len: int | None

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """Make ready to sample from `policy` as it stands; called before the first `generate`.

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
            prompt_ids: P lists of token ids. May be none: ranks that share an engine, or weights,
                all call this as often.
            sampling: how to draw.
            num_completions: G; 1 when the temperature is 0.
            seed: everything random derives from it; the global random state is left alone.
        """
        ...

    def sleep(self) -> None:
        """Give back memory that training needs; whatever comes next wakes it."""
        ...

    def close(self) -> None:
        """Free what `start` took."""
        ...


@runtime_checkable
class SyncedEngine(Engine, Protocol):
    """An engine with weights of its own, as `WeightSync` keeps it up to date.

    Attributes:
        sleep_mode: what `sleep` gives back; `weights` means that every sync must `load` them all.
    """

    sleep_mode: Literal["none", "kv", "weights"]

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        """Replace weights, and forget what was computed from the old ones.

        Args:
            weights: all of the policy, or those that changed. Of those with a projection an exact
                fp32 master is kept, to merge factors into.
            version: optimizer steps behind these weights.

        Raises:
            ValueError: unknown names or other shapes.
        """
        ...

    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        """Merge consecutive updates into the masters, in order; replace `others`.

        Raises:
            ValueError: the versions do not follow on, or names are unknown or missing.
        """
        ...

    def share(self, policy: nn.Module) -> None:
        """Make the policy's parameters views of the engine's weights, with their values.

        Raises:
            ValueError: why this cannot be.
        """
        ...

    def refresh(self, *, version: int) -> None:
        """Forget what was computed from older weights, where weights are shared."""
        ...

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        """Names of the weights that the engine does not hold bit for bit, masters included."""
        ...
