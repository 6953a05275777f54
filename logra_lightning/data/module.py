"""`TokenizedDataModule`: tokenization, filters and loaders; subclasses say where rows come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from logra_lightning.data.encode import PromptEncoder, PromptTemplate
from logra_lightning.data.loader import PromptLoader
from logra_lightning.data.order import drawn
from logra_lightning.data.tokenized_prompts import Part, TokenizedPrompts, column_names
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import PromptBatch

Rows = Sequence[Mapping[str, Any]]

_PROGRESS_FROM = 20_000  # prompts: fewer are tokenized within two seconds
_NAMED = 10  # rows that a message names, at most


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source and how their prompts are made.

    Args:
        label: what the source is called.
        rows: with all columns.
        prompt_column: holds a string or a list of messages.
        prompt_template: makes the prompt of other columns instead; None takes the module's.
        system_prompt: None takes the module's.
        option: where the user typed these options.
    """

    label: str
    rows: Rows
    prompt_column: str = "prompt"
    prompt_template: str | None = None
    system_prompt: str | None = None
    option: str = "data.init_args"


class TokenizedDataModule(LightningDataModule):
    """Tokenization, filters and loaders; a subclass defines `load_rows` or `load_sources`.

    Every row gets a column `source`, the label of where it came from, unless it has one.

    Args:
        tokenizer: folder or hub name; the CLI sets it to `model.model`.
        system_prompt: put before messages that have none; needs a chat template.
        prompt_template: makes the prompt of columns, for instance `{question} Think first.`;
            a brace of the text is doubled. Left out, `prompt_column` is the prompt.
        chat_template_kwargs: passed to the chat template, for instance `{enable_thinking: false}`.
        prompts_per_step: prompts of one batch over all ranks.
        eval_batch_size: prompts of one validation batch over all ranks.
        max_prompt_tokens: longest prompt allowed.
        overlong_prompts: `error` refuses longer ones before training, `drop` leaves them out and
            says which.
        unusable_rows: `error` refuses rows that a reward cannot score, `drop` leaves them out and
            says which.
        seed: of the order of training prompts.

    Attributes:
        prompt_column: holds a string or a list of messages.
        weights: shares of the training sources; None gives out every prompt once per epoch.
        train: training prompts, after `setup`.
        val: validation prompts, after `setup`.
    """

    prompt_column = "prompt"
    weights: Sequence[float] | None = None

    def __init__(
        self,
        tokenizer: str,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        prompts_per_step: int = 32,
        eval_batch_size: int = 256,
        max_prompt_tokens: int = 1024,
        overlong_prompts: Literal["error", "drop"] = "error",
        unusable_rows: Literal["error", "drop"] = "error",
        seed: int = 0,
    ) -> None:
        super().__init__()
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
        if prompt_template is not None:
            PromptTemplate(prompt_template)
        self.tokenizer_path = tokenizer
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.prompts_per_step = prompts_per_step
        self.eval_batch_size = eval_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts = overlong_prompts
        self.unusable_rows = unusable_rows
        self.seed = seed
        self.train: TokenizedPrompts | None = None
        self.val: TokenizedPrompts | None = None

    def load_rows(self) -> tuple[Rows, Rows]:
        """Training and validation rows of the one source."""
        raise NotImplementedError(f"{type(self).__name__} must define load_rows or load_sources")

    def load_sources(self) -> tuple[list[SourceRows], list[SourceRows]]:
        """Training and validation sources; `load_rows` as one source each where not overridden."""
        train, val = self.load_rows()
        label = type(self).__name__
        return (
            [SourceRows(label, train, self.prompt_column)],
            [SourceRows(label, val, self.prompt_column)],
        )

    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        tokenizer = load_tokenizer(self.tokenizer_path)
        train_sources, val_sources = self.load_sources()
        train = self._tokenize(train_sources, tokenizer, "training")
        val = self._tokenize(val_sources, tokenizer, "validation")
        _check_some_left([len(source.rows) for source in train_sources], train)
        if len(train_sources) > 1 or len(val_sources) > 1:
            names = column_names([*train.rows, *val.rows])
            train, val = train.with_columns(names), val.with_columns(names)
        self.train, self.val = train, val
        trained = set(map(tuple, train.prompt_ids))
        both = sum(tuple(ids) in trained for ids in val.prompt_ids)
        if both:
            rank_zero_info(f"{both} of {len(val)} validation prompts are also training prompts.")

    def leave_out(self, reasons_for: Callable[[Rows], dict[int, str]]) -> None:
        """Refuse or leave out what cannot be used, as `unusable_rows` says.

        Args:
            reasons_for: rows to the positions of those that cannot be used, and why; called with
                the training and with the validation rows.

        Raises:
            ValueError: there are such rows and `unusable_rows` is `error`, or no training prompts
                of a source are left.
        """
        assert self.train is not None
        assert self.val is not None
        before = self.train.sizes
        self.train = self._left_out(self.train, reasons_for(self.train.rows), "training")
        self.val = self._left_out(self.val, reasons_for(self.val.rows), "validation")
        _check_some_left(before, self.train)

    def refill(self, count: int, seed: int) -> PromptBatch:
        """`count` different training prompts, drawn at random by the weights of their sources.

        A pure function of the seed, which leaves the position of the loader as it is.

        Raises:
            ValueError: there are fewer prompts.
        """
        assert self.train is not None
        if not 1 <= count <= len(self.train):
            raise ValueError(
                f"cannot draw {count} different prompts from {len(self.train)} training prompts"
            )
        return self.train.batch(drawn(self.train.sizes, self.weights, count, seed))

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rewards may ask for, in training and in validation."""
        assert self.train is not None
        assert self.val is not None
        in_both = [prompts for prompts in (self.train, self.val) if len(prompts)]
        names = in_both[0].columns if in_both else []
        return [name for name in names if all(name in prompts.columns for prompts in in_both)]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        assert self.train is not None
        assert self.val is not None
        return max((len(ids) for ids in self.train.prompt_ids + self.val.prompt_ids), default=0)

    # Filters.

    def _tokenize(
        self, sources: Sequence[SourceRows], tokenizer: Any, what: str
    ) -> TokenizedPrompts:
        from tqdm import tqdm  # type: ignore[import-untyped]

        every = TokenizedPrompts([], [], [], [])
        first = 0
        for source in sources:
            every.parts.append(Part(source.label, first))
            encode = self._encoder(source, tokenizer)
            of = f" of {source.label!r}" if len(sources) > 1 else ""
            hidden = len(source.rows) <= _PROGRESS_FROM or getattr(rank_zero_only, "rank", 0) != 0
            bar = tqdm(source.rows, f"{what} prompts{of}", disable=hidden)
            for number, row in enumerate(bar):
                every.prompt_ids.append(encode(row, f"{what} row {number}{of}"))
                label = row.get("source", source.label)
                every.rows.append({**row, "source": None if label is None else str(label)})
                every.numbers.append(first + number)
            first += len(source.rows)
        return self._without_overlong(every, what)

    def _encoder(self, source: SourceRows, tokenizer: Any) -> PromptEncoder:
        template, system = source.prompt_template, source.system_prompt
        return PromptEncoder(
            tokenizer,
            self.tokenizer_path,
            prompt_column=source.prompt_column,
            prompt_template=self.prompt_template if template is None else template,
            system_prompt=self.system_prompt if system is None else system,
            chat_template_kwargs=self.chat_template_kwargs,
            option=source.option,
        )

    def _without_overlong(self, prompts: TokenizedPrompts, what: str) -> TokenizedPrompts:
        lengths = [len(ids) for ids in prompts.prompt_ids]
        overlong = [i for i, length in enumerate(lengths) if length > self.max_prompt_tokens]
        if not overlong:
            return prompts
        longest = max(overlong, key=lambda i: lengths[i])
        found = (
            f"{len(overlong)} of {len(prompts)} {what} prompts are longer than max_prompt_tokens="
            f"{self.max_prompt_tokens}; the longest, {prompts.place(longest)}, has "
            f"{lengths[longest]} tokens"
        )
        if self.overlong_prompts == "error":
            raise ValueError(
                f"{found}: raise the limit or set data.init_args.overlong_prompts=drop"
            )
        rank_zero_info(f"{found}. Dropped {_some([prompts.place(i) for i in overlong])}.")
        return prompts.without(set(overlong))

    def _left_out(
        self, prompts: TokenizedPrompts, reasons: Mapping[int, str], what: str
    ) -> TokenizedPrompts:
        if not reasons:
            return prompts
        named = _some([f"{prompts.place(i)} ({reasons[i]})" for i in sorted(reasons)])
        found = f"{len(reasons)} of {len(prompts)} {what} rows cannot be used"
        if self.unusable_rows == "error":
            raise ValueError(
                f"{found}: {named}: mend them or set data.init_args.unusable_rows=drop"
            )
        rank_zero_info(f"{found}. Dropped {named}.")
        return prompts.without(reasons.keys())

    # Loaders.

    def _loader(self, prompts: TokenizedPrompts | None, batch_size: int, train: bool) -> Any:
        assert prompts is not None
        trainer = self.trainer
        return PromptLoader(
            prompts,
            batch_size,
            seed=self.seed if train else None,
            weights=self.weights if train else None,
            process_index=trainer.global_rank if trainer else 0,
            num_processes=trainer.world_size if trainer else 1,
        )

    def train_dataloader(self) -> PromptLoader:
        return self._loader(self.train, self.prompts_per_step, train=True)

    def val_dataloader(self) -> PromptLoader | list[Any]:
        return self._loader(self.val, self.eval_batch_size, train=False) if self.val else []

    def test_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> PromptLoader | list[Any]:
        return self.val_dataloader()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _check_some_left(before: Sequence[int], prompts: TokenizedPrompts) -> None:
    for had, has, part in zip(before, prompts.sizes, prompts.parts, strict=True):
        if had and not has:
            raise ValueError(
                f"none of the {had} training rows of {part.label!r} is left after dropping: see "
                f"data.init_args.overlong_prompts and unusable_rows"
            )
