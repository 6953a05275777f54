"""Prompts that cannot be used, too long or unfit for a reward, are refused or left out by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from logra_lightning.data.tokenized_prompts import TokenizedPrompts
from logra_lightning.names import listed

_NAMED = 10  # a message names at most so many rows


def without_overlong(
    prompts: TokenizedPrompts, max_tokens: int, choice: Literal["error", "drop"], used_for: str
) -> TokenizedPrompts:
    """Return the prompts that have at most `max_tokens` tokens.

    Args:
        prompts: what is filtered.
        max_tokens: longest prompt allowed, in tokens.
        choice: `error` refuses longer prompts, `drop` leaves them out and names them.
        used_for: `training` or `validation`, for messages.

    Raises:
        ValueError: there are longer prompts and `choice` is `error`.
    """
    lengths = [len(ids) for ids in prompts.prompt_ids]
    overlong = [i for i, length in enumerate(lengths) if length > max_tokens]
    if not overlong:
        return prompts
    longest = max(overlong, key=lambda i: lengths[i])
    found = (
        f"{len(overlong)} of {len(prompts)} {used_for} prompts are longer than max_prompt_tokens="
        f"{max_tokens}; the longest, {prompts.row_name(longest)}, has {lengths[longest]} tokens"
    )
    if choice == "error":
        raise ValueError(f"{found}: raise the limit or set data.init_args.overlong_prompts=drop")
    names = listed([prompts.row_name(i) for i in overlong], _NAMED)
    rank_zero_info(f"{found}. Dropped {names}.")
    return prompts.without(set(overlong))


def without_unusable(
    prompts: TokenizedPrompts,
    reasons: Mapping[int, str],
    choice: Literal["error", "drop"],
    used_for: str,
) -> TokenizedPrompts:
    """Return the prompts at positions for which there is no reason against them.

    Args:
        prompts: what is filtered.
        reasons: position of a row that cannot be used, to the reason.
        choice: `error` refuses such rows, `drop` leaves them out and names them.
        used_for: `training` or `validation`, for messages.

    Raises:
        ValueError: there are such rows and `choice` is `error`.
    """
    if not reasons:
        return prompts
    names = listed([f"{prompts.row_name(i)} ({reasons[i]})" for i in sorted(reasons)], _NAMED)
    found = f"{len(reasons)} of {len(prompts)} {used_for} rows cannot be used"
    if choice == "error":
        raise ValueError(f"{found}: {names}: mend them or set data.init_args.unusable_rows=drop")
    rank_zero_info(f"{found}. Dropped {names}.")
    return prompts.without(reasons.keys())


def check_some_left(before: Sequence[int], prompts: TokenizedPrompts) -> None:
    """Raise ValueError where a source had training prompts before filters and has none now.

    Args:
        before: number of prompts of each source before filters.
        prompts: what the filters left.
    """
    for had, has, part in zip(before, prompts.sizes, prompts.parts, strict=True):
        if had and not has:
            raise ValueError(
                f"none of the {had} training rows of {part.label!r} is left after dropping: see "
                f"data.init_args.overlong_prompts and unusable_rows"
            )


def check_token_ids(largest: int, row_name: str, vocabulary: int) -> None:
    """Raise ValueError where a prompt has a token that the model has no embedding of.

    Args:
        largest: largest token id of all prompts.
        row_name: name of the row that has it.
        vocabulary: number of the model's embeddings.
    """
    if largest >= vocabulary:
        raise ValueError(
            f"{row_name} has the token id {largest}, but the model has {vocabulary} embeddings: "
            f"give data.init_args.tokenizer the model's own tokenizer, without tokens that were "
            f"added later"
        )
