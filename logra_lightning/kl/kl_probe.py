"""`KLProbe`: completion tokens on which the KL of a step is predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.kl.inject import Change, injected_update

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class KLProbe:
    """Some completion tokens of a step, and how to run the model on them.

    `forwards` may be empty in a process that has no rollouts.

    Args:
        model: the model that `forwards` run; error messages name its modules.
        forwards: functions without arguments. Each runs the model on a part of the tokens and
            returns the final hidden states [T, H] at the T positions that predict them.
        logits: turns hidden states [n, H] into logits [n, V], divided by the temperature.
        prepared: makes the context in which `forwards` and `logits` are called; `rollout_probe`
            switches to plain attention there, which has forward-mode derivatives.
        mismatch: mean of `rollout_logprobs - logprobs` over the tokens of the step in all
            processes, in nats; None where it is not known. Every process must give the same value.
    """

    model: nn.Module
    forwards: Sequence[Callable[[], Tensor]]
    logits: Callable[[Tensor], Tensor]
    prepared: Callable[[], AbstractContextManager[None]] = nullcontext
    mismatch: float | None = None

    @property
    def device(self) -> torch.device:
        """The model's device; without rollouts no hidden state could tell it."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def chunk_tokens(self, hidden: Tensor) -> int:
        """The number of tokens whose logits [n, V] take at most 64 MiB in fp64, at least one.

        Args:
            hidden: [T, H] hidden states, of which one is looked at to know V.
        """
        if not len(hidden):
            return 1
        return max(1, _CHUNK_BYTES // (8 * self.logits(hidden[:1]).shape[-1]))

    @torch.no_grad()
    def hidden(self, changes: Sequence[Change] = ()) -> list[Tensor]:
        """Final hidden states [T, H] of each forward pass, with `changes` injected."""
        with self.prepared(), injected_update(changes):
            return [forward() for forward in self.forwards]


@torch.no_grad()
def first_not_finite(model: nn.Module, run: Callable[[], Sequence[Tensor]]) -> str:
    """Name of the first module of the model whose output is not finite, empty if there is none.

    Args:
        model: the model whose modules are named.
        run: runs the model forward. Where what it returns is not finite, but the output of every
            module is, the output embedding is named: it may be computed without its module.
    """
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and module in names and not torch.isfinite(output).all():
            found.append(names[module])

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        results = run()
    finally:
        handle.remove()
    if not found and not all(torch.isfinite(result).all() for result in results):
        head: Any = getattr(model, "get_output_embeddings", lambda: None)
        found.append(names.get(head(), ""))
    return found[0] if found else ""
