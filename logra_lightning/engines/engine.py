"""`Engine` and `SyncedEngine`: what a class must offer so that it can sample the completions.

Token ids go in and token ids come out, never text. To write an engine of your own, give a class the
attributes and methods of one of the two protocols; there is nothing to inherit. `Engine` is enough
where completions are sampled from the very weights that are trained, as `TorchEngine` does. An
engine with a copy of the weights, such as `VLLMEngine`, is a `SyncedEngine`: the callback
`WeightSync` brings every update to it.

The order of calls in a run, in which only a `SyncedEngine` gets those in brackets:

    start(policy, stop_token_ids)            once, before anything is sampled
    [load(all weights) or share(policy)]     when training starts, also after a resume
    for each training batch:
        generate(prompt_ids, ...)            perhaps several times
        sleep()                              the policy trains on the completions
        [merge(...), load(...) or refresh()] the weights have changed
    close()                                  at the end, also after an error

An engine may have one more method, `expect(longest=..., dtype=...)`, which is called before `start`
with what the run will ask for, where the engine's own options leave it open: the largest number of
tokens of a prompt and its completion together (None where the data does not tell), and the dtype
that the policy computes in (None where it is that of its weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from logra_lightning.engines.weights import PolicyWeight
from logra_lightning.sketch import Factors
from logra_lightning.types import Completion, SamplingParams


class Engine(Protocol):
    """Samples completions from a policy.

    Attributes:
        policy_version: the number of optimizer steps that made the weights which are sampled from,
            0 before the first step; None where these are the very weights that are trained.
        max_model_len: the largest number of tokens of a prompt and its completion together; None
            where only the model sets a limit.
    """

    policy_version: int | None
    max_model_len: int | None

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """Get ready to sample from `policy` with the weights that it has now.

        Called before the first `generate`, and again for a new run after `close`.

        Args:
            policy: the `transformers` model that is trained.
            stop_token_ids: token ids that end a completion.
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
        """Draw `num_completions` completions of each prompt.

        The same weights, arguments and seed give the same completions, and the global random states
        of Python, numpy and torch stay as they are. A run can be resumed exactly only so.

        Args:
            prompt_ids: P prompts, each a list of token ids. P may be 0: where processes share an
                engine or the weights, all of them call this the same number of times.
            sampling: temperature, length limit, `top_p` and `top_k`.
            num_completions: G, the number of completions of each prompt; 1 if the temperature is 0.
            seed: the number from which everything random is derived.

        Returns:
            P lists of G completions, in the order of the prompts. A completion that stopped ends
            with its stop token, and its `logprobs` belong to the distribution that it was drawn
            from, after temperature, `top_k` and `top_p`. A token without a finite logprob does not
            train and is counted in `mismatch/invalid_tokens`.
        """
        ...

    def sleep(self) -> None:
        """Give back memory that training can use; the next call of any other method wakes it.

        An engine that holds nothing between calls does nothing here.
        """
        ...

    def close(self) -> None:
        """Free what `start` took; does nothing if the engine was not started."""
        ...


@runtime_checkable
class SyncedEngine(Engine, Protocol):
    """An engine with weights of its own, which `WeightSync` keeps equal to the policy's.

    The engine reports the weights that it holds by `policy_version`. `WeightSync` also sets that
    attribute itself, after steps that changed no weight.

    Attributes:
        sleep_mode: what `sleep` gives back: `none`, `kv` (the key-value cache) or `weights` (the
            cache and the weights, so that after every sleep all weights must be loaded again).
    """

    sleep_mode: Literal["none", "kv", "weights"]

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        """Replace weights by those given, and forget what was computed from the old ones.

        A weight with a `projection` will later be updated by factors. The engine keeps an exact
        fp32 master of it, built from `tensor` and `residual`, to merge them into.

        Args:
            weights: all weights of the policy, or only those that changed; made one at a time, so
                that they need not be in memory together.
            version: the number of optimizer steps that made these weights.

        Raises:
            ValueError: a weight has a name or a shape that the engine does not know.
        """
        ...

    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        """Merge the factors of one or more steps into the masters, `W <- decay * W - D A` each.

        The engine's version afterwards is the last update's version plus one: at version 4, factors
        with the versions 4 and 5 lead to version 6. What was computed from the old weights is
        forgotten. Row 9 of docs/method.md.

        Args:
            updates: factors of consecutive steps, the oldest first.
            others: weights without a projection that changed in the same steps; they are replaced.

        Raises:
            ValueError: the first update was not made from the weights that the engine holds, an
                update does not follow the one before it, or its directions are not exactly those
                of the masters.
        """
        ...

    def share(self, policy: nn.Module) -> None:
        """Let each parameter of the policy use the memory of the engine's weight, values kept.

        From then on an optimizer step changes the engine's weights too, and only `refresh` is
        needed.

        Raises:
            ValueError: the memory cannot be shared; the message says why.
        """
        ...

    def refresh(self, *, version: int) -> None:
        """Forget what was computed from older weights; called after each step of shared weights.

        Args:
            version: the number of optimizer steps that made the weights as they are now.
        """
        ...

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        """Names of the given weights that the engine does not hold bit for bit.

        Where a weight has a projection, its fp32 master is compared.
        """
        ...
