"""`TokenizedDataModule`: tokenization, filters and loaders for rows that a subclass loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from logra_lightning.data.chat import check_template_kwargs
from logra_lightning.data.encode import PromptEncoder, PromptTemplate
from logra_lightning.data.filters import check_some_left, without_overlong, without_unusable
from logra_lightning.data.loader import PromptLoader
from logra_lightning.data.order import drawn
from logra_lightning.data.source_rows import Rows, SourceRows, tokenized
from logra_lightning.data.tokenized_prompts import TokenizedPrompts, column_names
from logra_lightning.data.where import told_at
from logra_lightning.seeding import run_seed
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import PromptBatch


class TokenizedDataModule(LightningDataModule):
    """Tokenization, filters and loaders; a subclass defines `load_rows`.

    Every row gets a column `source`, the label of its source, unless it has one.

    Args:
        tokenizer: folder or hub name of the tokenizer; the command line sets it to `model.model`.
        tokenizer_kwargs: options of `from_pretrained` such as `revision` and `trust_remote_code`;
            the command line takes them from `model.model_kwargs`.
        system_prompt: system message for prompts that have none; needs a chat template.
        prompt_template: text of the prompt, with columns in braces, for instance
            `{question} Think first.`; a brace that belongs to the text is written twice. Without
            it, the column `prompt_column` is the prompt.
        chat_template_kwargs: further arguments for the chat template, for instance
            `{enable_thinking: false}`; they win over the defaults. With
            `{continue_final_message: true}` the policy continues the assistant's last message.
        prompts_per_step: number of prompts in one training batch, all processes together.
        eval_batch_size: number of prompts in one validation batch, all processes together.
        max_prompt_tokens: longest prompt allowed, in tokens.
        overlong_prompts: what to do with prompts longer than `max_prompt_tokens`: `error` refuses
            to train, `drop` leaves them out and names them.
        unusable_rows: what to do with rows that a reward cannot score: `error` refuses to train,
            `drop` leaves them out and names them.
        seed: seed of the order of the training prompts; null takes the command line's
            `seed_everything`.

    Attributes:
        prompt_column: column with the prompt of plain rows, a string or a list of messages.
        weights: share of each training source, relative to the others; None gives out every prompt
            once per epoch.
        train: training prompts, after `setup`.
        val: validation prompts, after `setup`.
    """

    prompt_column = "prompt"
    weights: Sequence[float] | None = None

    def __init__(
        self,
        tokenizer: str,
        *,
        tokenizer_kwargs: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        prompts_per_step: int = 32,
        eval_batch_size: int = 256,
        max_prompt_tokens: int = 1024,
        overlong_prompts: Literal["error", "drop"] = "error",
        unusable_rows: Literal["error", "drop"] = "error",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if hasattr(self, "load_sources"):
            raise ValueError(
                f"{type(self).__name__}.load_sources is called load_rows now: rename it"
            )
        if min(max_prompt_tokens, eval_batch_size, prompts_per_step) < 1:
            raise ValueError(
                "max_prompt_tokens, eval_batch_size and prompts_per_step of data.init_args must be "
                "at least 1"
            )
        for name, value in (
            ("overlong_prompts", overlong_prompts),
            ("unusable_rows", unusable_rows),
        ):
            if value not in ("error", "drop"):
                raise ValueError(f"data.init_args.{name} must be error or drop, got {value!r}")
        with told_at("data.init_args"):
            check_template_kwargs(chat_template_kwargs or {})
            if prompt_template is not None:
                PromptTemplate(prompt_template)
        self.tokenizer_path = tokenizer
        self.tokenizer_kwargs = tokenizer_kwargs or {}
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.prompts_per_step = prompts_per_step
        self.eval_batch_size = eval_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts = overlong_prompts
        self.unusable_rows = unusable_rows
        self.seed = run_seed(seed)
        self.train: TokenizedPrompts | None = None
        self.val: TokenizedPrompts | None = None
        self._train_loader: PromptLoader | None = None

    def load_rows(self) -> tuple[Rows | Sequence[SourceRows], Rows | Sequence[SourceRows]]:
        """Return training and validation rows.

        Each of the two is a list of rows, mappings from column name to value, or a list of
        `SourceRows` where prompts come from several sources or are made in different ways.
        """
        raise NotImplementedError(f"{type(self).__name__} must define load_rows")

    def setup(self, stage: str) -> None:
        self._train_loader = None
        if self.train is not None:
            return
        tokenizer = load_tokenizer(self.tokenizer_path, **self.tokenizer_kwargs)
        train_sources, val_sources = map(self._as_sources, self.load_rows())
        train = self._tokenized(train_sources, tokenizer, "training")
        val = self._tokenized(val_sources, tokenizer, "validation")
        check_some_left([len(source.rows) for source in train_sources], train)
        if len(train_sources) > 1 or len(val_sources) > 1:
            names = column_names([*train.rows, *val.rows])
            train, val = train.with_columns(names), val.with_columns(names)
        self.train, self.val = train, val
        trained = set(map(tuple, train.prompt_ids))
        both = sum(tuple(ids) in trained for ids in val.prompt_ids)
        if both:
            rank_zero_info(f"{both} of {len(val)} validation prompts are also training prompts.")

    def leave_out(self, reasons_for: Callable[[Rows], dict[int, str]]) -> None:
        """Refuse or leave out the rows that cannot be used, as `unusable_rows` says.

        Args:
            reasons_for: a function of rows that returns the positions of those that cannot be used
                and why, such as `{3: "no answer"}`. It is called with the training rows, then with
                the validation rows.

        Raises:
            ValueError: there are such rows and `unusable_rows` is `error`, or a source has no
                training rows left.
        """
        assert self.train is not None
        assert self.val is not None
        before = self.train.sizes
        choice = self.unusable_rows
        self.train = without_unusable(self.train, reasons_for(self.train.rows), choice, "training")
        self.val = without_unusable(self.val, reasons_for(self.val.rows), choice, "validation")
        check_some_left(before, self.train)

    def refill(self, count: int, seed: int) -> PromptBatch:
        """Return `count` different training prompts, drawn at random by the weights of the sources.

        The draw depends on `seed` alone and leaves the position of the loader as it is.

        Args:
            count: number of prompts to draw.
            seed: another seed gives an unrelated draw.

        Raises:
            ValueError: there are fewer than `count` training prompts.
        """
        assert self.train is not None
        if not 1 <= count <= len(self.train):
            raise ValueError(
                f"cannot draw {count} different prompts from {len(self.train)} training prompts"
            )
        return self.train.batch(drawn(self.train.sizes, self.weights, count, seed))

    @property
    def columns(self) -> list[str]:
        """Names of the columns that both training and validation have: rewards may ask for them."""
        assert self.train is not None
        assert self.val is not None
        in_use = [prompts for prompts in (self.train, self.val) if len(prompts)]
        names = in_use[0].columns if in_use else []
        return [name for name in names if all(name in prompts.columns for prompts in in_use)]

    def largest(self, measure: Callable[[list[int]], int]) -> tuple[int, str]:
        """Return the largest measure of all prompts, and the name of the row that has it.

        `largest(len)` is the longest prompt, such as `(57, "training row 3 of 'gsm8k'")`, and
        `largest(max)` the one with the largest token id. Without prompts it is `(0, "no row")`.

        Args:
            measure: a function of the token ids of one prompt.
        """
        assert self.train is not None
        assert self.val is not None
        found = (0, "no row")
        for used_for, prompts in (("training", self.train), ("validation", self.val)):
            for position, ids in enumerate(prompts.prompt_ids):
                if measure(ids) > found[0]:
                    found = measure(ids), f"{used_for} {prompts.row_name(position)}"
        return found

    def train_dataloader(self) -> PromptLoader:
        """Return the loader of the training prompts, the same one until the next `setup`.

        With `reload_dataloaders_every_n_epochs` Lightning asks for it again in the middle of a run,
        which then goes on with the next prompts.
        """
        if self._train_loader is None:
            self._train_loader = self._loader(
                self.train, self.prompts_per_step, self.seed, self.weights
            )
        return self._train_loader

    def val_dataloader(self) -> PromptLoader | list[Any]:
        return self._loader(self.val, self.eval_batch_size, None, None) if self.val else []

    def test_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()

    def _as_sources(self, rows: Rows | Sequence[SourceRows]) -> list[SourceRows]:
        """What `load_rows` returned, with plain rows as one source."""
        if rows and isinstance(rows[0], SourceRows):
            others = [type(row).__name__ for row in rows if not isinstance(row, SourceRows)]
            if others:
                raise ValueError(
                    f"{type(self).__name__}.load_rows returns SourceRows together with "
                    f"{others[0]}: put those rows into SourceRows of their own"
                )
            return list(cast(Sequence[SourceRows], rows))
        return [SourceRows(type(self).__name__, cast(Rows, rows), self.prompt_column)]

    def _tokenized(
        self, sources: Sequence[SourceRows], tokenizer: Any, used_for: str
    ) -> TokenizedPrompts:
        prompts = tokenized(sources, partial(self._encoder, tokenizer), used_for)
        return without_overlong(prompts, self.max_prompt_tokens, self.overlong_prompts, used_for)

    def _encoder(self, tokenizer: Any, source: SourceRows) -> PromptEncoder:
        template, system = source.prompt_template, source.system_prompt
        return PromptEncoder(
            tokenizer,
            self.tokenizer_path,
            prompt_column=source.prompt_column,
            prompt_template=self.prompt_template if template is None else template,
            system_prompt=self.system_prompt if system is None else system,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _loader(
        self,
        prompts: TokenizedPrompts | None,
        batch_size: int,
        seed: int | None,
        weights: Sequence[float] | None,
    ) -> PromptLoader:
        assert prompts is not None
        return PromptLoader(
            prompts,
            batch_size,
            seed=seed,
            weights=weights,
            overfit_batches=getattr(self.trainer, "overfit_batches", 0),
            process_index=self.trainer.global_rank if self.trainer else 0,
            num_processes=self.trainer.world_size if self.trainer else 1,
        )
