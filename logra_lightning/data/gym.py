"""Prompts made by reasoning-gym: `GymSource`, and `ReasoningGymDataModule` with one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from logra_lightning.data.module import TokenizedDataModule
from logra_lightning.data.source_rows import Rows, SourceRows
from logra_lightning.data.where import told_at


@dataclass
class GymSpec:
    """One task of reasoning-gym.

    Args:
        name: name of the task in reasoning-gym, such as `chain_sum`.
        weight: share of the prompts, relative to the other tasks.
        config: options of the task, such as `{min_terms: 2}`.
    """

    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class GymSource:
    """Tasks of reasoning-gym as one source of a mix.

    Args:
        tasks: tasks that make the prompts, mixed by their weights.
        weight: share of the training prompts, relative to the other sources.
        size: number of training prompts to make; those that are also validation prompts are then
            left out.
        val_size: number of validation prompts to make.
        val_seed: seed of the validation prompts; the training prompts have the data module's.
        system_prompt: system message for the prompts; without it, the data module's.
        prompt_template: text of the prompt, with columns in braces; without it, the data module's.
    """

    tasks: list[GymSpec]
    weight: float = 1.0
    size: int = 10_000
    val_size: int = 0
    val_seed: int = 1_000_000
    system_prompt: str | None = None
    prompt_template: str | None = None

    def check(self, seed: int) -> None:
        """Raise ValueError for an option out of range.

        Args:
            seed: seed of the training prompts, which must be far enough from `val_seed`.
        """
        if self.size < 1 or self.val_size < 0:
            raise ValueError(
                f"size must be at least 1 and val_size not negative, got {self.size} and "
                f"{self.val_size}"
            )
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be positive and finite, got {self.weight}")
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one reasoning-gym task")
        # reasoning-gym makes row i with seed + i, so that sets of closer seeds share rows.
        if abs(seed - self.val_seed) < max(self.size, self.val_size):
            raise ValueError(
                f"val_seed={self.val_seed} and data.init_args.seed={seed} are closer than size="
                f"{self.size}, so validation would repeat training prompts: set them further apart"
            )

    def load(self, seed: int) -> tuple[SourceRows, SourceRows]:
        """Return training and validation rows; a prompt of both is left out of training.

        Args:
            seed: seed of the training prompts.

        Raises:
            ValueError: reasoning-gym does not know a task or refuses its options, or all training
                prompts are also validation prompts.
        """
        val = self._make(self.val_size, self.val_seed)
        held_out = {row["question"] for row in val}
        train = [row for row in self._make(self.size, seed) if row["question"] not in held_out]
        if not train:
            raise ValueError(
                f"tasks have so few prompts that all are in the validation set: lower "
                f"val_size={self.val_size}"
            )
        return self._source_rows(train), self._source_rows(val)

    def _source_rows(self, rows: Rows) -> SourceRows:
        return SourceRows(
            "reasoning_gym", rows, "question", self.prompt_template, self.system_prompt
        )

    def _make(self, size: int, seed: int) -> list[dict[str, Any]]:
        if size == 0:
            return []
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                "prompts of reasoning-gym need it: pip install 'logra-lightning[tasks]'"
            ) from error
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS

        unknown = [task.name for task in self.tasks if task.name not in DATASETS]
        if unknown:
            raise ValueError(
                f"reasoning-gym has no task {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(DATASETS))}"
            )
        specs = [DatasetSpec(name=t.name, weight=t.weight, config=t.config) for t in self.tasks]
        try:
            made = reasoning_gym.create_dataset("composite", datasets=specs, size=size, seed=seed)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"reasoning-gym refuses tasks: {error}") from error
        return [{**row, "source": row["metadata"]["source_dataset"]} for row in made]


class ReasoningGymDataModule(TokenizedDataModule):
    """Prompts made by reasoning-gym; score them with `rewards.GymScore`.

    Rows have the columns `question`, `answer`, `metadata` and `source`, the name of the task.
    Training prompts that are also in the validation set are left out.

    Args:
        tasks: tasks that make the prompts, mixed by their weights.
        tokenizer: folder or hub name of the tokenizer; the command line sets it to `model.model`.
        size: number of training prompts to make; those that are also validation prompts are then
            left out.
        val_size: number of validation prompts to make.
        val_seed: seed of the validation prompts; the training prompts have `seed`.
        options: further options of `TokenizedDataModule`; `seed` is also the seed of the training
            prompts.

    Raises:
        ValueError: there are no tasks or an unknown one, or the seeds are so close that training
            and validation would have the same prompts.
    """

    def __init__(
        self,
        tasks: list[GymSpec],
        tokenizer: str,
        *,
        size: int = 10_000,
        val_size: int = 256,
        val_seed: int = 1_000_000,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        self.gym = GymSource(tasks, size=size, val_size=val_size, val_seed=val_seed)
        with told_at("data.init_args"):
            self.gym.check(self.seed)

    @told_at("data.init_args")
    def load_rows(self) -> tuple[list[SourceRows], list[SourceRows]]:
        train, val = self.gym.load(self.seed)
        return [train], [val]
