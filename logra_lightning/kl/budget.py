"""What a step may cost, and the step scale that keeps to it (rows 6 and 7 of docs/method.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

_SHRINK = 0.5  # a step scale that was too large is at least halved


@dataclass(frozen=True)
class Schedule:
    r"""The KL budget of each update, a function of the number of updates before it.

    .. math:: \mathrm{end} + (\mathrm{start} - \mathrm{end}) \cdot \tfrac12 (1 + \cos \pi x), \qquad
        x = \min(1, n / (\mathrm{steps} - 1))

    for update n with `cosine`; `linear` has 1 - x in place of the cosine term.

    Args:
        start: budget of update 0, in nats per completion token.
        end: budget of update `steps - 1` and of all after it, in nats per completion token.
        steps: number of updates in which the budget goes from `start` to `end`.
        shape: `cosine`, `linear`, or `constant` (always `start`).

    Raises:
        ValueError: a value is out of range.
    """

    start: float
    end: float
    steps: int
    shape: Literal["cosine", "linear", "constant"]

    def __post_init__(self) -> None:
        start, end, steps = self.start, self.end, self.steps
        if not 0 < start < math.inf or not 0 < end < math.inf or steps < 1:
            raise ValueError(
                f"kl_budget needs start > 0, end > 0 and steps >= 1, got {start}, {end} and {steps}"
            )
        if self.shape not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"kl_budget.schedule must be cosine, linear or constant, got {self.shape!r}"
            )

    def __call__(self, updates: int) -> float:
        """The budget after this many updates, in nats per completion token."""
        if self.shape == "constant":
            return self.start
        done = min(1.0, updates / (self.steps - 1)) if self.steps > 1 else 1.0
        left = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.end + (self.start - self.end) * left


class MismatchAverage:
    """Moving average of the mismatch between engine and trainer, in nats per token.

    The mismatch of a step is the mean of `rollout_logprobs - logprobs`; a negative one counts as 0,
    and one that is None or not finite is left out. With weight .3, an average of 1e-4 becomes
    1.3e-4 when the newest mismatch is 2e-4.

    Args:
        weight: weight of the newest mismatch, above 0 and at most 1.

    Attributes:
        value: the average, None before the first mismatch; all that a checkpoint must hold.

    Raises:
        ValueError: `weight` is out of range.
    """

    def __init__(self, weight: float) -> None:
        if not 0 < weight <= 1:
            raise ValueError(
                f"kl_budget.mismatch_weight must be above 0 and at most 1, got {weight}"
            )
        self.weight = weight
        self.value: float | None = None

    def with_newest(self, mismatch: float | None) -> float | None:
        """The average as it would be with one more mismatch."""
        if mismatch is None or not math.isfinite(mismatch):
            return self.value
        newest = max(0.0, mismatch)
        if self.value is None:
            return newest
        return self.value + self.weight * (newest - self.value)

    def add(self, mismatch: float | None) -> None:
        """Take one more mismatch into the average."""
        self.value = self.with_newest(mismatch)

    def subtracted_from(self, budget: float, mismatch: float | None) -> float:
        """The budget less the average with the newest mismatch, but at least half the budget."""
        average = self.with_newest(mismatch)
        return budget if average is None else max(budget / 2, budget - average)


def predicted_scale(q: float, budget: float, max_scale: float) -> float:
    """The step scale whose predicted KL is the budget, at most `max_scale`; 1 where q is 0.

    Args:
        q: predicted KL of a step of scale 1, in nats per token.
        budget: what the step may cost, in nats per token.
        max_scale: largest step scale.
    """
    return min(max_scale, math.sqrt(budget / q)) if q > 0 else 1.0


def shrink_until_within(
    measure: Callable[[float], float],
    scale: float,
    budget: float,
    *,
    tolerance: float,
    max_backtracks: int,
) -> tuple[float, float, int]:
    """Shrink a step scale until its measured KL is at most `tolerance` times the budget.

    Each time the scale is multiplied by what would bring a quadratic KL down to the budget, or by
    a half if that is less: a measured KL of 16 times the budget gives a quarter of the scale.

    Args:
        measure: step scale to measured KL, in nats per token.
        scale: step scale to begin with.
        budget: what the step may cost, in nats per token.
        tolerance: how many times the budget is still accepted.
        max_backtracks: how many times the scale is shrunk at most.

    Returns:
        The last step scale, its measured KL, which may still be too large, and how many times the
        scale was shrunk.
    """
    measured = measure(scale)
    backtracks = 0
    while not measured <= tolerance * budget and backtracks < max_backtracks:
        over = math.sqrt(budget / measured) if 0 < measured < math.inf else _SHRINK
        scale *= min(_SHRINK, over)
        measured = measure(scale)
        backtracks += 1
    return scale, measured, backtracks
