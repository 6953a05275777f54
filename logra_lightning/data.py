"""Data modules: where prompts come from, tokenized once, through the chat template if any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from logra_lightning.policy import load_tokenizer
from logra_lightning.prompt_loader import PromptLoader, TokenizedPrompts

Message = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


class TokenizedDataModule(LightningDataModule, ABC):
    """Tokenization and loaders; a subclass says where the rows come from.

    Args:
        tokenizer: folder or hub name; the CLI sets it to `model.model`.
        system_prompt: put before messages that have none; needs a chat template.
        chat_template_kwargs: passed to the chat template, for instance `{enable_thinking: false}`.
        prompts_per_step: prompts of one batch over all ranks.
        eval_batch_size: prompts of one validation batch over all ranks.
        max_prompt_tokens: longest prompt allowed.
        overlong_prompts: `error` refuses longer ones before training, `drop` leaves them out and
            says which.
        seed: of the order of training prompts.

    Attributes:
        prompt_column: holds a string or a list of messages.
    """

    prompt_column = "prompt"

    def __init__(
        self,
        tokenizer: str,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        prompts_per_step: int = 32,
        eval_batch_size: int = 256,
        max_prompt_tokens: int = 1024,
        overlong_prompts: Literal["error", "drop"] = "error",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(max_prompt_tokens, eval_batch_size, prompts_per_step) < 1:
            raise ValueError(
                "max_prompt_tokens, eval_batch_size and prompts_per_step of data.init_args must be "
                "at least 1"
            )
        self.tokenizer_path = tokenizer
        self.system_prompt = system_prompt
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.prompts_per_step = prompts_per_step
        self.eval_batch_size = eval_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts = overlong_prompts
        self.seed = seed
        self.train: TokenizedPrompts | None = None
        self.val: TokenizedPrompts | None = None

    @abstractmethod
    def load_rows(self) -> tuple[Rows, Rows]:
        """Training and validation rows."""

    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        tokenizer = load_tokenizer(self.tokenizer_path)
        train, val = self.load_rows()
        self.train = self._tokenize(train, tokenizer, "training")
        self.val = self._tokenize(val, tokenizer, "validation")

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rewards may ask for."""
        assert self.train is not None
        assert self.val is not None
        some = self.train.rows or self.val.rows
        return list(some[0]) if some else []

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        assert self.train is not None
        assert self.val is not None
        return max((len(ids) for ids in self.train.prompt_ids + self.val.prompt_ids), default=0)

    def _tokenize(self, rows: Rows, tokenizer: Any, what: str) -> TokenizedPrompts:
        kept = TokenizedPrompts([], [], [])
        overlong = []
        for number, row in enumerate(rows):
            if self.prompt_column not in row:
                raise ValueError(
                    f"the {what} data has no column {self.prompt_column!r}, only "
                    f"{', '.join(map(repr, row))}: set data.init_args.prompt_column"
                )
            ids = self._encode(row[self.prompt_column], tokenizer, f"{what} row {number}")
            if len(ids) > self.max_prompt_tokens:
                overlong.append((number, len(ids)))
                continue
            kept.prompt_ids.append(ids)
            kept.rows.append(dict(row))
            kept.numbers.append(number)
        if overlong:
            self._report_overlong(overlong, len(rows), what)
        return kept

    def _report_overlong(self, overlong: list[tuple[int, int]], total: int, what: str) -> None:
        number, tokens = max(overlong, key=lambda item: item[1])
        found = (
            f"{len(overlong)} of {total} {what} prompts are longer than max_prompt_tokens="
            f"{self.max_prompt_tokens}; the longest, row {number}, has {tokens} tokens"
        )
        if self.overlong_prompts == "error":
            raise ValueError(
                f"{found}: raise the limit or set data.init_args.overlong_prompts=drop"
            )
        first = ", ".join(str(number) for number, _ in overlong[:10])
        rank_zero_info(f"{found}. Dropped rows {first}{', ...' if len(overlong) > 10 else ''}.")

    def _encode(self, prompt: object, tokenizer: Any, where: str) -> list[int]:
        """A string or a list of messages to token ids, through the chat template if any."""
        if isinstance(prompt, str) and prompt.strip():
            messages: list[Message] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
            messages = [dict(message) for message in prompt]
        else:
            raise ValueError(
                f"the prompt of {where} must be a non-empty string or a list of messages, got "
                f"{prompt!r}"
            )
        if tokenizer.chat_template is None:
            if not isinstance(prompt, str) or self.system_prompt or self.chat_template_kwargs:
                raise ValueError(
                    f"the tokenizer of {self.tokenizer_path!r} has no chat template, so {where} "
                    f"must be a string, without system_prompt and chat_template_kwargs in "
                    f"data.init_args"
                )
            return list(tokenizer(prompt)["input_ids"])
        if self.system_prompt and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        encoded = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        return list(encoded["input_ids"])

    def _loader(self, prompts: TokenizedPrompts | None, batch_size: int, train: bool) -> Any:
        assert prompts is not None
        trainer = self.trainer
        return PromptLoader(
            prompts,
            batch_size,
            seed=self.seed if train else None,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
        )

    def train_dataloader(self) -> PromptLoader:
        return self._loader(self.train, self.prompts_per_step, train=True)

    def val_dataloader(self) -> PromptLoader | list[Any]:
        return self._loader(self.val, self.eval_batch_size, train=False) if self.val else []

    def test_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()


class PromptDataModule(TokenizedDataModule):
    """Prompts from a Hugging Face data set: a hub name, or local JSON, JSONL or parquet files.

    Args:
        path: name on the hub, a folder, or a `.json`, `.jsonl` or `.parquet` file.
        tokenizer: as in `TokenizedDataModule`.
        name: configuration of the data set on the hub.
        split: of the training prompts.
        val_path: where validation prompts come from; `path` when left out.
        val_split: of the validation prompts.
        val_size: without `val_path` and `val_split`, how many of the last training rows to hold
            out for validation.
        prompt_column: holds a string or a list of messages.
        columns: new name to existing column, for instance `{answer: solution}`.
        options: as in `TokenizedDataModule`.

    Raises:
        ValueError: at setup: no such column, a prompt that is empty or too long, no prompts.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        *,
        name: str | None = None,
        split: str = "train",
        val_path: str | None = None,
        val_split: str | None = None,
        val_size: int = 0,
        prompt_column: str = "prompt",
        columns: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        if val_size < 0 or (val_size and (val_path or val_split)):
            raise ValueError(
                "val_size must not be negative, and holds rows out of the training split: use it "
                "without val_path and val_split"
            )
        self.prompt_column = prompt_column
        self.path = path
        self.config_name = name
        self.split = split
        self.val_path = val_path
        self.val_split = val_split
        self.val_size = val_size
        self.renamed = columns or {}

    def load_rows(self) -> tuple[Rows, Rows]:
        train = self._load(self.path, self.split)
        if self.val_path or self.val_split:
            val = self._load(self.val_path or self.path, self.val_split or "train")
            return train, val
        if self.val_size >= len(train):
            raise ValueError(
                f"val_size is {self.val_size}, but {self.path!r} has {len(train)} rows"
            )
        cut = len(train) - self.val_size
        return train[:cut], train[cut:]

    def _load(self, path: str, split: str) -> list[dict[str, Any]]:
        from datasets import load_dataset

        suffix = Path(path).suffix
        if suffix in (".json", ".jsonl", ".parquet"):
            if not Path(path).is_file():
                raise ValueError(f"there is no file {path!r}: set data.init_args.path")
            if Path(path).stat().st_size == 0:
                raise ValueError(f"{path!r} is empty")
            builder = "parquet" if suffix == ".parquet" else "json"
            source: dict[str, Any] = {"path": builder, "data_files": {split: path}}
        else:
            source = {"path": path, "name": self.config_name}
        try:
            rows = load_dataset(**source, split=split)
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(
                f"cannot read {path!r} (split {split!r}): {cause or type(cause).__name__}"
            ) from error
        if len(rows) == 0:
            raise ValueError(f"{path!r} has no rows in split {split!r}")
        for new, old in self.renamed.items():
            if old not in rows.column_names:
                raise ValueError(
                    f"data.init_args.columns names {old!r}, but {path!r} has "
                    f"{', '.join(map(repr, rows.column_names))}"
                )
            if new in rows.column_names:
                rows = rows.remove_columns(new)
            rows = rows.rename_column(old, new)
        return list(rows)


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


class ReasoningGymDataModule(TokenizedDataModule):
    """Prompts made by reasoning-gym; score them with `rewards.GymScore`.

    Rows have the columns `question`, `answer` and `metadata`. Training prompts that are also in
    the validation set are left out.

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
        if size < 1 or val_size < 0:
            raise ValueError(
                f"data.init_args.size must be at least 1 and val_size not negative, got {size} and "
                f"{val_size}"
            )
        if not tasks:
            raise ValueError("data.init_args.tasks is empty: name at least one reasoning-gym task")
        # reasoning-gym seeds row i with seed + i, so closer seeds share rows.
        if abs(self.seed - val_seed) < max(size, val_size):
            raise ValueError(
                f"seed={self.seed} and val_seed={val_seed} of data.init_args are closer than "
                f"size={size}, so validation would repeat training prompts: set them further apart"
            )
        self.tasks = tasks
        self.size = size
        self.val_size = val_size
        self.val_seed = val_seed

    def load_rows(self) -> tuple[Rows, Rows]:
        val = self._make(self.val_size, self.val_seed)
        held_out = {row["question"] for row in val}
        train = [r for r in self._make(self.size, self.seed) if r["question"] not in held_out]
        return train, val

    def _make(self, size: int, seed: int) -> list[dict[str, Any]]:
        if size == 0:
            return []
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                "ReasoningGymDataModule needs reasoning-gym: pip install 'logra-lightning[tasks]'"
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
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning-gym refuses data.init_args.tasks: {error}") from error
        return list(made)
