"""`PromptLoader`: batches of tokenized prompts in an order that survives a resume.

Rows keep all their columns, so that rewards can ask for them by name. The order depends on the seed
and the position alone; nothing is drawn from the global random state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from logra_lightning.data.order import interleaved, quotas, shuffled
from logra_lightning.data.tokenized_prompts import TokenizedPrompts
from logra_lightning.types import PromptBatch


class PromptLoader:
    """Batches of prompts for this process, in an order that can be resumed.

    Training (`seed` given): the prompts are gone through in passes. Every pass has its own order,
    which does not depend on the size of a batch, and prompts that do not fill a last batch are left
    out of it. An iteration has as many batches as a pass, and goes on where the one before it
    stopped: where Lightning takes fewer batches per epoch, the next epoch takes the next prompts.

    Validation (`seed` None): every iteration has the prompts as they stand, with a smaller last
    batch where they do not divide.

    It has a length: Lightning fetches one batch ahead where a loader has none, and would save the
    position of that batch.

    Args:
        prompts: prompts to iterate over.
        batch_size: number of prompts in one batch, all processes together.
        seed: seed of the order in training; None keeps the prompts as they stand.
        weights: share of each part of `prompts` in a pass, relative to the others. None gives out
            every prompt once per pass.
        overfit_batches: Lightning's option of this name: in training, every pass has the same few
            batches, so many or this share of all; 0 takes all prompts. They are the first prompts
            as they stand, or in a mix the first of the first pass.
        process_index: number of this process, from 0.
        num_processes: number of processes.

    Raises:
        ValueError: the processes cannot share a batch evenly, there are fewer prompts than one
            batch needs, or a weight is so small that its source gives no prompt in a pass.
    """

    def __init__(
        self,
        prompts: TokenizedPrompts,
        batch_size: int,
        *,
        seed: int | None,
        weights: Sequence[float] | None = None,
        overfit_batches: int | float = 0,
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
        self.overfit_batches = overfit_batches
        self.process_index = process_index
        self.num_processes = num_processes
        self.epoch = 0
        self.position = 0
        self.loaded: dict[str, Any] | None = None  # for `follow_loader`
        self._sizes = prompts.sizes
        self._check_weights()

    def _check_weights(self) -> None:
        if self.seed is None or self.weights is None:
            return
        length = len(self.prompts)
        for part, quota in zip(self.prompts.parts, quotas(self.weights, length), strict=True):
            if quota == 0:
                raise ValueError(
                    f"the weight of source {part.label!r} is so small that none of the {length} "
                    f"prompts of an epoch comes from it: raise its weight in data.init_args"
                )

    def __len__(self) -> int:
        full, rest = divmod(len(self.prompts), self.batch_size)
        return full + (self.seed is None and rest > 0)

    @property
    def pass_prompts(self) -> int:
        """Number of prompts of one pass, of which those that do not fill a batch are left out."""
        batches = self.overfit_batches
        if self.seed is None or not batches:
            return len(self.prompts)
        # As Lightning counts them: a whole number is one of batches, any other a share of all.
        count = batches if isinstance(batches, int) else int(batches * len(self))
        return min(max(count, 1), len(self)) * self.batch_size

    @property
    def batches_left(self) -> int:
        """Number of full batches that are still to come in this pass."""
        return (self.pass_prompts - self.position) // self.batch_size

    def __iter__(self) -> Iterator[PromptBatch]:
        return self._validation() if self.seed is None else self._training()

    def _validation(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self.prompts), self.batch_size):
            end = min(start + self.batch_size, len(self.prompts))
            yield self._share(range(start, end))

    def _training(self) -> Iterator[PromptBatch]:
        order: list[int] | None = None
        for _ in range(len(self)):
            if self.batches_left == 0:
                self.epoch, self.position, order = self.epoch + 1, 0, None
            order = self._order() if order is None else order
            start = self.position
            self.position += self.batch_size
            yield self._share(order[start : self.position])

    def _share(self, batch: Sequence[int]) -> PromptBatch:
        # A process takes neighbours: taking every second prompt could give it one source only.
        first, end = (
            len(batch) * process // self.num_processes
            for process in (self.process_index, self.process_index + 1)
        )
        return self.prompts.batch(batch[first:end])

    def _order(self) -> list[int]:
        assert self.seed is not None
        total = len(self.prompts)
        if self.weights is not None:
            epoch = 0 if self.overfit_batches else self.epoch
            return interleaved(self._sizes, self.weights, self.seed, epoch, total)
        return (
            list(range(total)) if self.overfit_batches else shuffled(total, self.seed, self.epoch)
        )

    @cached_property
    def fingerprint(self) -> str:
        """What the order is made of, in short: token ids, weights, seed, and whether it repeats."""
        repeated = self.pass_prompts if self.overfit_batches else None
        weights = None if self.weights is None else list(map(float, self.weights))
        found = sha256(repr((self.seed, weights, self._sizes, repeated)).encode())
        for ids in self.prompts.prompt_ids:
            found.update(array("Q", [len(ids), *ids]).tobytes())
        return found.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the place for a checkpoint: pass, prompts of it given out, and which data it is.

        After three batches of four prompts it is `{"epoch": 0, "position": 12, "batch_size": 4,
        "fingerprint": "0f9b..."}`.
        """
        return {
            "epoch": self.epoch,
            "position": self.position,
            "batch_size": self.batch_size,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the first prompt that had not been given out when `state` was saved.

        A pass in which no full batch was left, or none is left now that batches are larger, is
        over. Other data than that of the state is begun with its first prompt, and a warning says
        so.
        """
        self.loaded = state
        if state.get("fingerprint") != self.fingerprint:
            rank_zero_warn(
                "The training prompts are not those of the checkpoint, or their weights, "
                "data.init_args.seed or trainer.overfit_batches are not: training begins with the "
                "first prompt of its order."
            )
            self.epoch = self.position = 0
            return
        self.epoch, self.position = state["epoch"], state["position"]
        if self.pass_prompts - self.position < max(state["batch_size"], self.batch_size):
            self.epoch, self.position = self.epoch + 1, 0
