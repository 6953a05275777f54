"""`PromptLoader`: batches of tokenized prompts in an order that survives a resume.

Rows keep all their columns, so that rewards can ask for them by name. The order depends on the seed
and the position alone; nothing is drawn from the global random state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from logra_lightning.data.order import interleaved, quotas, shuffled
from logra_lightning.data.tokenized_prompts import TokenizedPrompts
from logra_lightning.types import PromptBatch


class PromptLoader:
    """Batches of prompts for this process, in an order that can be resumed.

    Training (`seed` given): every epoch has its own order, and prompts that do not fill a last
    batch are left out of it. Validation (`seed` None): the prompts as they stand, with a smaller
    last batch where they do not divide.

    It has a length: Lightning fetches one batch ahead where a loader has none, and would save the
    position of that batch.

    Args:
        prompts: prompts to iterate over.
        batch_size: number of prompts in one batch, all processes together.
        seed: seed of the order in training; None keeps the prompts as they stand.
        weights: share of each part of `prompts` in an epoch, relative to the others. None gives out
            every prompt once per epoch.
        process_index: number of this process, from 0.
        num_processes: number of processes.

    Raises:
        ValueError: the processes cannot share a batch evenly, there are fewer prompts than one
            batch needs, or a weight is so small that its source gives no prompt in an epoch.
    """

    def __init__(
        self,
        prompts: TokenizedPrompts,
        batch_size: int,
        *,
        seed: int | None,
        weights: Sequence[float] | None = None,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % num_processes:
            nearest = max(1, round(batch_size / num_processes)) * num_processes
            raise ValueError(
                f"prompts_per_step must be a positive multiple of the {num_processes} processes, "
                f"got {batch_size}: the nearest is {nearest}"
            )
        if seed is not None and len(prompts) < batch_size:
            raise ValueError(
                f"prompts_per_step is {batch_size}, but there are only {len(prompts)} prompts"
            )
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.weights = weights
        self.process_index = process_index
        self.num_processes = num_processes
        self.epoch = 0
        self.position = 0
        self._sizes = prompts.sizes
        self._check_weights()

    def _check_weights(self) -> None:
        if self.seed is None or self.weights is None:
            return
        length = len(self) * self.batch_size
        for part, quota in zip(self.prompts.parts, quotas(self.weights, length), strict=True):
            if quota == 0:
                raise ValueError(
                    f"the weight of source {part.label!r} is so small that none of the {length} "
                    f"prompts of an epoch comes from it: raise its weight in data.init_args"
                )

    def __len__(self) -> int:
        full, rest = divmod(len(self.prompts), self.batch_size)
        return full + (self.seed is None and rest > 0)

    def __iter__(self) -> Iterator[PromptBatch]:
        if self.seed is None:
            self.position = 0
        elif self.position >= len(self):
            self.epoch += 1
            self.position = 0
        order = self._order()
        while self.position < len(self):
            start = self.position * self.batch_size
            batch = order[start : start + self.batch_size]
            self.position += 1
            # A process takes neighbours: taking every second prompt could give it one source only.
            first, end = (
                len(batch) * process // self.num_processes
                for process in (self.process_index, self.process_index + 1)
            )
            yield self.prompts.batch(batch[first:end])

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(len(self.prompts)))
        if self.weights is None:
            return shuffled(len(self.prompts), self.seed, self.epoch)
        length = len(self) * self.batch_size
        return interleaved(self._sizes, self.weights, self.seed, self.epoch, length)

    def state_dict(self) -> dict[str, int]:
        """Return the position for a checkpoint: `{"epoch": 0, "position": 3}` after 3 batches."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that had been given out when `state` was saved."""
        self.epoch, self.position = state["epoch"], state["position"]
