"""`SourceRows`: the rows of one source, and how their prompts become token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from logra_lightning.data.encode import PromptEncoder
from logra_lightning.data.tokenized_prompts import Part, TokenizedPrompts
from logra_lightning.data.where import told_at

Rows = Sequence[Mapping[str, Any]]

_PROGRESS_FROM = 20_000  # fewer prompts are tokenized within two seconds


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source and how their prompts are made.

    Args:
        label: name of the source, for the column `source` of its rows and for messages.
        rows: one mapping from column name to value for each row.
        prompt_column: column with the prompt, which is a string or a list of messages.
        prompt_template: text that makes the prompt of other columns; None takes the data module's.
        system_prompt: system message for prompts that have none; None takes the data module's.
        typed_at: the option that holds this source, as the user types it, for errors.
    """

    label: str
    rows: Rows
    prompt_column: str = "prompt"
    prompt_template: str | None = None
    system_prompt: str | None = None
    typed_at: str = "data.init_args"


def tokenized(
    sources: Sequence[SourceRows],
    encoder_of: Callable[[SourceRows], PromptEncoder],
    used_for: str,
) -> TokenizedPrompts:
    """Return the prompts of all sources as token ids, one source after the other.

    Every row gets a column `source`, the label of its source, unless it has one.

    Args:
        sources: what is tokenized.
        encoder_of: makes the encoder for the prompts of a source.
        used_for: `training` or `validation`, for messages.

    Raises:
        ValueError: a row has no prompt, or one that the tokenizer cannot take.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    prompts = TokenizedPrompts([], [], [], [])
    first = 0
    for source in sources:
        prompts.parts.append(Part(source.label, first))
        of_source = f" of {source.label!r}" if len(sources) > 1 else ""
        hidden = len(source.rows) <= _PROGRESS_FROM or getattr(rank_zero_only, "rank", 0) != 0
        with told_at(source.typed_at):
            encode = encoder_of(source)
            bar = tqdm(source.rows, f"{used_for} prompts{of_source}", disable=hidden)
            for number, row in enumerate(bar):
                if not isinstance(row, Mapping):
                    raise ValueError(
                        f"{used_for} row {number}{of_source} is no mapping from column name to "
                        f"value, but {type(row).__name__}: load_rows returns such rows alone, or "
                        f"SourceRows alone"
                    )
                prompts.prompt_ids.append(encode(row, f"{used_for} row {number}{of_source}"))
                label = row.get("source", source.label)
                prompts.rows.append({**row, "source": None if label is None else str(label)})
                prompts.numbers.append(first + number)
        first += len(source.rows)
    return prompts
