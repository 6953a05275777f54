"""`Reward`: a function with a weight, and how functions get the columns they ask for by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra_lightning.types import PromptBatch

# Given to every reward that asks for them; a data set may not have columns of these names.
RESERVED = ("completion", "completion_ids", "prompt_ids")


@dataclass
class Reward:
    """One term of the reward.

    Args:
        function: called once per completion as `function(completion=..., answer=..., ...)` with
            the arguments that its signature names: `completion` (text without special tokens),
            `completion_ids`, `prompt_ids`, or any column of the data set. `**kwargs` receives
            everything. Returns a finite number, or None where it does not apply.
        weight: multiplies its values in the sum.
        name: in logs, as `rewards/<name>`; the function's own name when left out.
    """

    function: Callable[..., float | None]
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"a reward's function must be callable, got {self.function!r}")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.label!r} is {self.weight}")

    @property
    def label(self) -> str:
        """Its name in logs."""
        return str(self.name or getattr(self.function, "__name__", type(self.function).__name__))

    def parameters(self) -> tuple[list[str], list[str], bool]:
        """Names that the function needs, names that it can do without, and whether it takes all."""
        needed: list[str] = []
        optional: list[str] = []
        takes_all = False
        for p in inspect.signature(self.function).parameters.values():
            if p.kind is p.VAR_KEYWORD:
                takes_all = True
            elif p.kind is not p.VAR_POSITIONAL:
                (needed if p.default is p.empty else optional).append(p.name)
        return needed, optional, takes_all


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise ValueError when a reward needs a column that is not there, or one shadows an argument.

    Args:
        rewards: all terms.
        columns: names of the data set's columns.
    """
    columns = list(columns)
    shadowing = [name for name in columns if name in RESERVED]
    if shadowing:
        raise ValueError(
            f"the data set has columns called {', '.join(map(repr, shadowing))}, which rewards get "
            f"from the rollout: rename them with data.init_args.columns"
        )
    for reward in rewards:
        missing = [n for n in reward.parameters()[0] if n not in columns and n not in RESERVED]
        if missing:
            raise ValueError(
                f"reward {reward.label!r} asks for {', '.join(map(repr, missing))}, but the data "
                f"set has only {', '.join(map(repr, columns)) or 'no columns'}: map one with "
                f"data.init_args.columns"
            )


def score(
    rewards: Sequence[Reward],
    prompts: PromptBatch,
    completions: Sequence[str],
    completion_ids: Sequence[list[int]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rewards of B = P * G completions, those of one prompt standing together.

    Args:
        rewards: all terms.
        prompts: P prompts with their columns.
        completions: B texts.
        completion_ids: B lists of token ids.

    Returns:
        [B] fp32 weighted sum, and name to [B] fp32 values, NaN where a term does not apply.

    Raises:
        ValueError: a column that is missing, or a value that is not a finite number.
    """
    check_columns(rewards, prompts.columns)
    repeats = len(completions) // len(prompts)
    total = torch.zeros(len(completions), dtype=torch.float64)
    scored = torch.zeros(len(completions), dtype=torch.bool)
    by_name: dict[str, Tensor] = {}
    for reward in rewards:
        needed, optional, takes_all = reward.parameters()
        values = torch.full((len(completions),), torch.nan, dtype=torch.float64)
        for i, (text, ids) in enumerate(zip(completions, completion_ids, strict=True)):
            row = i // repeats
            available: dict[str, Any] = {n: v[row] for n, v in prompts.columns.items()}
            available |= {"completion": text, "completion_ids": ids}
            available |= {"prompt_ids": prompts.prompt_ids[row]}
            wanted = available if takes_all else set(needed) | set(optional)
            value = reward.function(**{n: available[n] for n in wanted if n in available})
            if value is not None:
                values[i] = _number(value, reward, prompts.rows[row])
        total += reward.weight * values.nan_to_num(0.0)
        scored |= ~values.isnan()
        by_name[reward.label] = values.to(torch.float32)
    if not scored.all():
        row = prompts.rows[int((~scored).nonzero()[0]) // repeats]
        raise ValueError(
            f"no reward applies to a completion of row {row}: {', '.join(by_name)} all returned "
            f"None. Is a return statement missing?"
        )
    return total.to(torch.float32), by_name


def _number(value: object, reward: Reward, row: int) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"reward {reward.label!r} returned {value!r} for row {row}: it must return a finite "
            f"number, or None where it does not apply"
        )
    return number
