"""`ReasoningGymDataModule`: prompts made by reasoning-gym, alone or as a source of a mix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from logra_lightning.data.module import Rows, SourceRows, TokenizedDataModule


@dataclass
class GymSpec:
    """One task of a mix.

    Args:
        name: of the reasoning-gym task, such as `chain_sum`.
        weight: share of the prompts, relative to the other tasks.
        config: options of the task.
    """

    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class GymSource:
    """Tasks of reasoning-gym as one source of a mix.

    Args:
        tasks: the mix within it.
        weight: share of the prompts, relative to the other sources.
        size: number of training prompts before those of the validation set are left out.
        val_size: number of validation prompts.
        val_seed: seed of the validation prompts.
        system_prompt: left out, the module's.
        prompt_template: left out, the module's.
    """

    tasks: list[GymSpec]
    weight: float = 1.0
    size: int = 10_000
    val_size: int = 0
    val_seed: int = 1_000_000
    system_prompt: str | None = None
    prompt_template: str | None = None

    def check(self, seed: int, option: str) -> None:
        """Raise ValueError where training with `seed` is impossible; `option` holds this source."""
        if self.size < 1 or self.val_size < 0:
            raise ValueError(
                f"{option}.size must be at least 1 and val_size not negative, got {self.size} and "
                f"{self.val_size}"
            )
        if not 0 < self.weight < math.inf:
            raise ValueError(f"{option}.weight must be positive and finite, got {self.weight}")
        if not self.tasks:
            raise ValueError(f"{option}.tasks is empty: name at least one reasoning-gym task")
        # reasoning-gym seeds row i with seed + i, so closer seeds share rows.
        if abs(seed - self.val_seed) < max(self.size, self.val_size):
            raise ValueError(
                f"seed={seed} and {option}.val_seed={self.val_seed} are closer than size="
                f"{self.size}, so validation would repeat training prompts: set them further apart"
            )

    def load(self, seed: int, option: str) -> tuple[SourceRows, SourceRows]:
        """Training and validation rows; those of both are in validation alone.

        Args:
            seed: of the training rows.
            option: where the user typed this source.
        """
        val = self._make(self.val_size, self.val_seed, option)
        held_out = {row["question"] for row in val}
        train = [
            row for row in self._make(self.size, seed, option) if row["question"] not in held_out
        ]
        if not train:
            raise ValueError(
                f"{option}.tasks have so few prompts that all are in the validation set: lower "
                f"val_size={self.val_size}"
            )
        return self._source(train, option), self._source(val, option)

    def _source(self, rows: Rows, option: str) -> SourceRows:
        return SourceRows(
            "reasoning_gym", rows, "question", self.prompt_template, self.system_prompt, option
        )

    def _make(self, size: int, seed: int, option: str) -> list[dict[str, Any]]:
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
            raise ValueError(f"reasoning-gym refuses {option}.tasks: {error}") from error
        return [{**row, "source": row["metadata"]["source_dataset"]} for row in made]


class ReasoningGymDataModule(TokenizedDataModule):
    """Prompts made by reasoning-gym; score them with `rewards.GymScore`.

    Rows have the columns `question`, `answer`, `metadata` and `source`, the name of the task.
    Training prompts that are also in the validation set are left out.

    Args:
        tasks: the mix.
        tokenizer: as in `TokenizedDataModule`.
        size: number of training prompts before those of the validation set are left out.
        val_size: number of validation prompts.
        val_seed: seed of the validation prompts.
        options: as in `TokenizedDataModule`; `seed` is also that of the training prompts.

    Raises:
        ValueError: no tasks, an unknown task, or seeds so close that both sets would be the same.
    """

    prompt_column = "question"

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
        self.gym.check(self.seed, "data.init_args")

    def load_rows(self) -> tuple[Rows, Rows]:
        train, val = self.gym.load(self.seed, "data.init_args")
        return train.rows, val.rows
