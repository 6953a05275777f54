"""`Reward`: a function with a weight, a name, and what becomes of its errors and overruns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logra_lightning.rewards.calls import Outcome, Pool, call_async, call_here, is_async


@dataclass
class Reward:
    """One term of the reward.

    Args:
        function: called once per completion as `function(completion=..., answer=..., ...)` with
            the arguments that its signature names: `completion` (text without special tokens),
            `completion_ids`, `prompt_ids`, or any column of the data set. `**kwargs` receives
            everything. Returns a finite number, or None where it does not apply. May be async;
            then the calls of a batch run at the same time.
        weight: multiplies its values in the sum.
        name: in logs, as `rewards/<name>`; the function's own name when left out.
        batched: call the function once per batch, with a list of B values for each argument; it
            returns B values. An exception among them stands for a call that raised it. A function
            that has an attribute `batched` need not be marked here.
        on_error: what becomes of a call that raises, overruns its limit, or returns something else
            than a finite number or None. `raise` stops the run; `zero` scores 0, counts it in
            `rewards/<name>/errors` or `rewards/<name>/timeouts`, and warns the first time.
        timeout_s: seconds that a call may take. Async functions are cancelled at their next
            `await`; plain ones are called in other processes, which are killed, so they must be
            importable from a module. A `prepare` method is called there beforehand.
        hang_s: seconds after which a call without `timeout_s` is taken to hang and is interrupted
            (async ones when none has ended for so long); then `on_error` applies. Where it cannot
            be interrupted, in C code that lets nothing else run, the process ends half a minute
            later with the place where it was. null waits for ever.

    Raises:
        ValueError: a value out of range, or a function that other processes cannot call.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    batched: bool = False
    on_error: Literal["raise", "zero"] = "raise"
    timeout_s: float | None = None
    hang_s: float | None = 600.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"a reward's function must be callable, got {self.function!r}")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.label!r} is {self.weight}")
        if self.on_error not in ("raise", "zero"):
            raise ValueError(
                f"on_error of reward {self.label!r} must be raise or zero, got {self.on_error!r}"
            )
        self.batched = self.batched or bool(getattr(self.function, "batched", False))
        self._warned = False
        self._pool: Pool | None = None
        for option in ("timeout_s", "hang_s"):
            seconds = getattr(self, option)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(
                    f"{option} of reward {self.label!r} must be above 0, got {seconds}"
                )
        if self.timeout_s is None:
            return
        if hasattr(self.function, "timeout_s"):
            raise ValueError(
                f"reward {self.label!r} has time limits of its own: set timeout_s of its function "
                f"(model.rewards, function.init_args) instead of the reward's"
            )
        if not is_async(self.function):
            try:
                self._pool = Pool(self.function, workers=1 if self.batched else None)
            except ValueError as error:
                raise ValueError(f"reward {self.label!r} has timeout_s: {error}") from error

    @property
    def label(self) -> str:
        """Its name in logs."""
        return str(self.name or getattr(self.function, "__name__", type(self.function).__name__))

    def call(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The outcome of each of B calls, or of those up to the first error where that raises.

        Args:
            calls: the arguments of each completion.

        Raises:
            ValueError: a batched function that does not return B values.
        """
        size = len(calls)
        if self.batched:
            calls = [{name: [call[name] for call in calls] for name in calls[0]}] if calls else []
        hang_s = None if hasattr(self.function, "timeout_s") else self.hang_s  # limits of its own
        if is_async(self.function):
            if hang_s is not None and self.timeout_s is not None:
                hang_s += self.timeout_s
            outcomes = call_async(self.function, calls, self.timeout_s, hang_s)
        elif self._pool is not None and self.timeout_s is not None:
            outcomes = self._pool.map(calls, self.timeout_s)
        else:
            outcomes = call_here(self.function, calls, self.on_error == "raise", hang_s)
        return self._split(outcomes[0], size) if self.batched and outcomes else outcomes

    def warn(self, problem: str) -> None:
        """Say the first time that `on_error: zero` was needed."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"{problem}. It scores 0, as will others (on_error: zero)", stacklevel=3)

    def _split(self, outcome: Outcome, size: int) -> list[Outcome]:
        """The outcomes of a batched call, one per completion; the first has what was noted."""
        noted = outcome.noted
        if outcome.error is not None:
            each = [Outcome(error=outcome.error)] * size
        else:
            try:
                values = [] if isinstance(outcome.value, Mapping) else list(outcome.value)
            except TypeError:
                values = []
            except Exception as error:  # of a generator
                return [Outcome(None, error, noted), *[Outcome(error=error)] * (size - 1)]
            if len(values) != size or isinstance(outcome.value, str):
                found = f"{len(values)} values" if values else repr(outcome.value)
                raise ValueError(
                    f"batched reward {self.label!r} returned {found} for {size} completions: it "
                    f"must return one number, or None, for each"
                )
            each = [
                Outcome(error=v) if isinstance(v, Exception) else Outcome(value=v) for v in values
            ]
        return [Outcome(each[0].value, each[0].error, noted), *each[1:]]
