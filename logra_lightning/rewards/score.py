"""`score`: the weighted sum of a run's rewards, each given the columns that it asks for by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from logra_lightning.rewards.calls import Outcome
from logra_lightning.rewards.parameters import Parameters
from logra_lightning.rewards.reward import Reward
from logra_lightning.types import PromptBatch

# Given to every reward that asks for them; a data set may not have columns of these names.
RESERVED = ("completion", "completion_ids", "prompt_ids")


@dataclass(frozen=True)
class Scores:
    """The scores of B completions.

    Args:
        total: [B] fp32, the weighted sum of all rewards; NaN where none applies.
        by_name: for each reward's name its values, [B] fp32, before its weight; NaN where the
            reward does not apply.
        metrics: names and values to be logged beside the rewards.
    """

    total: Tensor
    by_name: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Check that the data set has the columns that the rewards ask for.

    Args:
        rewards: all rewards of the run.
        columns: names of the data set's columns.

    Raises:
        ValueError: if a reward asks for a column that is not there, or a column has the name of
            something that rewards get from the rollout, such as `completion`.
    """
    columns = list(columns)
    shadowing = [name for name in columns if name in RESERVED]
    if shadowing:
        raise ValueError(
            f"the data set has columns called {', '.join(map(repr, shadowing))}, which rewards get "
            f"from the rollout: rename them with data.init_args.columns"
        )
    for reward in rewards:
        missing = [
            n
            for n in Parameters.of(reward.function).needed
            if n not in columns and n not in RESERVED
        ]
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
) -> Scores:
    r"""Score B = P * G completions: G of the first prompt, then G of the second, and so on.

    .. math:: \text{total}_i = \sum_r \text{weight}_r \, \text{value}_{r,i}

    over the rewards r that apply to completion i; NaN where none does. With P = 2 and G = 2,
    completions 0 and 1 get the columns of prompt 0, completions 2 and 3 those of prompt 1.

    Args:
        rewards: all rewards of the run.
        prompts: P prompts with their columns.
        completions: B texts, without special tokens.
        completion_ids: B lists of token ids.

    Raises:
        ValueError: if a column is missing, a reward returns anything but a finite number or None
            (unless its `on_error` is `zero`), or a batched one returns not as many values as there
            are completions.
        RuntimeError: if a function raised or overran its time limit (unless its `on_error` is
            `zero`).
    """
    check_columns(rewards, prompts.columns)
    repeats = len(completions) // len(prompts)
    rows = [prompts.rows[i // repeats] for i in range(len(completions))]
    available = [
        {n: v[i // repeats] for n, v in prompts.columns.items()}
        | {
            "completion": text,
            "completion_ids": ids,
            "prompt_ids": prompts.prompt_ids[i // repeats],
        }
        for i, (text, ids) in enumerate(zip(completions, completion_ids, strict=True))
    ]
    total = torch.zeros(len(completions), dtype=torch.float64)
    scored = torch.zeros(len(completions), dtype=torch.bool)
    by_name: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for reward in rewards:
        parameters = Parameters.of(reward.function)
        outcomes = reward.call([parameters.among(given) for given in available])
        numbers, found = _numbers(reward, outcomes, rows, completions)
        values = torch.tensor(numbers, dtype=torch.float64)
        total += reward.weight * values.nan_to_num(0.0)
        scored |= ~values.isnan()
        by_name[reward.label] = values.to(torch.float32)
        metrics |= {f"rewards/{reward.label}/{name}": value for name, value in found.items()}
    total = total.masked_fill(~scored, math.nan).to(torch.float32)
    return Scores(total, by_name, metrics)


def _numbers(
    reward: Reward, outcomes: Sequence[Outcome], rows: Sequence[int], completions: Sequence[str]
) -> tuple[list[float], dict[str, float]]:
    """The value of each call, NaN where the reward does not apply; and the metrics it noted."""
    noted: dict[str, list[float]] = {}
    numbers: list[float] = []
    errors = timeouts = 0
    for i, outcome in enumerate(outcomes):
        for name, value in outcome.noted:
            noted.setdefault(name, []).append(value)
        problem, cause = _problem(outcome)
        if not problem:
            numbers.append(math.nan if outcome.value is None else float(outcome.value))
            continue
        start = completions[i][:80] + ("..." if len(completions[i]) > 80 else "")
        problem = f"reward {reward.label!r} {problem} for row {rows[i]}, completion {start!r}"
        if reward.on_error == "raise":
            if cause is None:
                raise ValueError(
                    f"{problem}: it must return a finite number, or None where it does not apply"
                )
            raise RuntimeError(f"{problem}: {cause}") from cause
        reward.warn(f"{problem}: {cause}" if cause is not None else problem)
        numbers.append(0.0)
        # Without timeout_s, a TimeoutError comes from the function itself or from hang_s.
        timed_out = isinstance(cause, TimeoutError) and reward.timeout_s is not None
        timeouts += timed_out
        errors += not timed_out
    metrics = {name: math.fsum(values) / len(values) for name, values in noted.items()}
    if reward.on_error == "zero":
        metrics["errors"] = float(errors)
        if reward.timeout_s is not None:
            metrics["timeouts"] = float(timeouts)
    return numbers, metrics


def _problem(outcome: Outcome) -> tuple[str, Exception | None]:
    """What is wrong with an outcome, in words, and what it raised; no words if it is fine."""
    value, error = outcome.value, outcome.error
    if isinstance(error, TimeoutError):
        return "overran its time limit", error
    if error is not None:
        return f"raised {type(error).__name__}", error
    try:
        number = math.nan if isinstance(value, str) else float(0.0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    fits = abs(number) <= torch.finfo(torch.float32).max  # False for NaN too
    return ("", None) if fits else (f"returned {value!r}", None)
