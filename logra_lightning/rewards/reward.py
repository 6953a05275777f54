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
    """A function that scores completions, with its weight in the sum of all rewards.

    Args:
        function: called once per completion with the arguments that its signature names, as
            `function(completion=..., answer=...)`. It can ask for `completion` (the text without
            special tokens), `completion_ids`, `prompt_ids`, and any column of the data set;
            `**kwargs` gets all of them. It returns a finite number, or None where it does not
            apply; a completion to which no reward applies is not trained on. If it is async, the
            calls of a batch run at the same time.
        weight: factor of the function's values in the sum.
        name: the reward's name in logs, as `rewards/<name>`; by default the function's own name.
        batched: whether the function is called once per batch, with a list of B values for each
            argument. It then returns B values; an exception among them counts as raised for that
            completion. A function with an attribute `batched = True` need not be marked here.
        on_error: what happens if a call raises, overruns its limit, or returns anything but a
            finite number or None. `raise` stops the run. `zero` scores 0, counts the call in
            `rewards/<name>/errors` or `rewards/<name>/timeouts`, and warns the first time.
        timeout_s: the time that one call may take, in seconds. An async function is cancelled at
            its `await`. A plain function is called in worker processes that are killed at the
            limit, so it must be importable from a module; if it has a method `prepare`, that is
            called before the first worker starts. null sets no limit.
        hang_s: the time in seconds after which a call without `timeout_s` counts as hanging and is
            interrupted, and `on_error` applies (for async functions: if no call has ended for so
            long). C code that never returns to Python cannot be interrupted: half a minute later
            the whole process ends and prints where it hung. null waits for ever.

    Raises:
        ValueError: if a value is out of range, or `timeout_s` is set for a function that other
            processes cannot import.
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
        """The reward's name in logs."""
        return str(self.name or getattr(self.function, "__name__", type(self.function).__name__))

    def call(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Call the function for B completions and return the outcome of each.

        Args:
            calls: the keyword arguments for each completion.

        Returns:
            B outcomes, or fewer if `on_error` is `raise` and a call raised: then the last outcome
            has its error, and the calls after it were not made.

        Raises:
            ValueError: if a batched function does not return B values.
        """
        size = len(calls)
        if self.batched:
            calls = [{name: [call[name] for call in calls] for name in calls[0]}] if calls else []
        # A function with an attribute timeout_s keeps limits of its own.
        hang_s = None if hasattr(self.function, "timeout_s") else self.hang_s
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
        """Warn of a problem that `on_error: zero` covers, once for each reward."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"{problem}. It scores 0, as will others (on_error: zero)", stacklevel=3)

    def _split(self, outcome: Outcome, size: int) -> list[Outcome]:
        """Part the outcome of a batched call into one per completion; the first keeps the notes."""
        noted = outcome.noted
        if outcome.error is not None:
            each = [Outcome(error=outcome.error)] * size
        else:
            try:
                values = [] if isinstance(outcome.value, Mapping) else list(outcome.value)
            except TypeError:
                values = []
            except Exception as error:  # a generator may raise while its values are listed
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
