"""`BatchLog`: what is logged of a batch: its rollouts, its steps and the seconds of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities import rank_zero_warn

from logra_lightning.distributed.processes import of_all_processes
from logra_lightning.objective import BatchStats
from logra_lightning.rollout.stats import merged_metrics
from logra_lightning.types import Rollouts

_MUCH_TRUNCATED = 0.25  # share of the first batch's completions


class BatchLog:
    """The numbers of one batch at a time.

    Attributes:
        stats: means and extremes over the tokens that the batch's steps train on.
    """

    def __init__(self) -> None:
        self.stats = BatchStats()
        self._seconds: dict[str, float] = {}
        self._checked_truncation = False
        self._told_invalid = False
        self._told_unscored = False

    def begin_batch(self) -> None:
        """Forget the batch before."""
        self.stats = BatchStats()
        self._seconds = {}

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Time what is done within, until `device` has finished it too; repeated phases add up."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def values(self, rollouts: Rollouts, max_tokens: int) -> dict[str, float]:
        """Tag to value over all processes; every process must call it.

        Warns where many completions of the first batch were cut off, once where the engine gave no
        finite logprob for a token, and of the first batch in which no reward applies to any
        completion.

        Args:
            rollouts: what this process sampled.
            max_tokens: limit of a completion, for the warning.
        """
        values = merged_metrics(of_all_processes(rollouts.metrics))
        truncated = values["rollout/truncated_frac"]
        if truncated > _MUCH_TRUNCATED and not self._checked_truncation:
            rank_zero_warn(
                f"{truncated:.0%} of the first batch's completions were cut off at model.sampling."
                f"max_tokens={max_tokens}: raise it unless that is meant"
            )
        self._checked_truncation = True
        self._tell_invalid(values)
        if values.get("rollout/unscored_frac") == 1.0 and not self._told_unscored:
            self._told_unscored = True
            rank_zero_warn(
                f"nothing is trained on a batch: {', '.join(rollouts.rewards_by_name)} returned "
                f"None for all of its completions. Is a return statement missing in model.rewards?"
            )
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        times["time/step_s"] = sum(self._seconds.values())
        return values | times | self.stats.values()

    def _tell_invalid(self, values: dict[str, float]) -> None:
        invalid = values.get("mismatch/invalid_tokens", 0.0)
        if invalid and not self._told_invalid:
            self._told_invalid = True
            rank_zero_warn(
                f"the engine returned no finite logprob for {invalid:.0f} of "
                f"{values['rollout/tokens']:.0f} tokens of a batch: they do not train "
                f"(mismatch/invalid_tokens)"
            )
