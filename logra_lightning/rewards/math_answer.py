"""`MathReward`: whether a completion's final answer equals the right one, by math-verify."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from logra_lightning.rewards.calls import Outcome, Pool, log_metric
from logra_lightning.rewards.final_answer import final_answer
from logra_lightning.rewards.math_grader import MathGrader
from logra_lightning.rewards.math_text import (
    as_list_like,
    is_bare,
    is_prose,
    is_run,
    normalized,
    plain_number,
    plain_words,
)
from logra_lightning.rewards.thinking import after_thinking

_FIRST_LIMIT_S = 1.0  # for every answer, before the slow ones are tried again
_CHUNK = 512  # gold answers that are checked between two steps of the progress bar


class MathReward:
    r"""1 if the final answer of a completion equals the gold answer, the right one; else 0.

    The final answer is the last that is marked, by a box, `####`, `<answer>` or "the answer is",
    and none before `</think>` counts; docs/objective.md has the rule. Without a mark, a completion
    that is nothing but one expression is the answer, and in any other text math-verify looks for
    one. Gold answers are read in the same way, so a column of worked solutions that end in
    `#### 42` or `\boxed{42}` can be used as it is.

    | gold | answer | value | because |
    |---|---|---|---|
    | `\dfrac{9}{7}`, without `$` | `\boxed{\frac{9}{7}}` | 1 | golds are LaTeX |
    | `1331 and 1728` | `\boxed{1728}` | 0 | several golds must all be found |
    | `1331 and 1728` | `\boxed{1728}` and `\boxed{1331}` | 1 | joined boxes are one answer |
    | `42` | `\boxed{42} ... \boxed{` | 1 | the last complete box counts |
    | `42` | `\boxed{41} ... \boxed{42}` | 1 | the last one, not any |
    | `... #### 42` | `#### 42` | 1 | the form of GSM8K, on both sides |
    | `1234` | `1,234` | 1 | thousands separators |
    | `-3` | `-3` with a Unicode minus | 1 | |
    | `70000` | `\$70,000` | 1 | currency signs are left out |
    | `5` | `5\text{ apples}`, `5 apples` | 1 | units are left out, on both sides |
    | `42` | `\boxed{42}`, then much text | 1 | the answer may stand anywhere |
    | `1/3` | `0.333333` | 1 | six decimals are compared, as math-verify does |
    | `50` | `50\%` | 1 | and 0.5 as well, as math-verify does |
    | `Tuesday` | `\text{tuesday}` | 1 | words are compared as words |

    `1,234,567` without spaces is one number; `40 2` is no number. Where other text stands around
    them, an answer in words must be marked by a box, `####` or `<answer>`.

    Numbers and words are compared right here. Everything else is algebra and goes to worker
    processes, which do not load torch and are killed at their limit. So this reward works from any
    thread and cannot hang. Every answer first gets one second. Those that need more are then tried
    again with `timeout_s` each, as long as `batch_timeout_s` lasts: slow answers cost the others
    nothing, and B answers take at most B / `workers` + `batch_timeout_s` seconds, for instance
    256 / 8 + 60 = 92. An answer that overruns its limit scores 0 and counts in
    `rewards/<name>/timeouts`; one whose worker dies or fails scores 0 and counts in
    `rewards/<name>/worker_errors`. Needs `pip install logra-lightning[tasks]`.

    Args:
        timeout_s: the time for one answer, in seconds.
        batch_timeout_s: the time for all slow answers of a batch together, in seconds.
        workers: number of worker processes; by default the number of cores, at most 8.
        memory_gib: address space of each worker process, in GiB.

    Raises:
        ValueError: if a limit is not above 0, or math-verify is not installed.
    """

    __name__ = "math"
    batched = True

    def __init__(
        self,
        timeout_s: float = 5.0,
        batch_timeout_s: float = 60.0,
        workers: int | None = None,
        memory_gib: float = 2.0,
    ) -> None:
        if not 0 < timeout_s < math.inf or not 0 < batch_timeout_s < math.inf:
            raise ValueError(
                f"MathReward needs timeout_s and batch_timeout_s above 0, got {timeout_s} and "
                f"{batch_timeout_s}"
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "MathReward needs math-verify: pip install 'logra-lightning[tasks]', or name "
                "another function in model.rewards"
            )
        self.timeout_s = timeout_s
        self.batch_timeout_s = batch_timeout_s
        self.pool = Pool(MathGrader(), workers, memory_gib)

    def __call__(
        self, completion: Sequence[str], answer: Sequence[Any]
    ) -> list[float | ValueError | None]:
        """Compare the final answers of B completions with the gold ones.

        Args:
            completion: B texts.
            answer: B gold answers, text or numbers; None where this reward does not apply.

        Returns:
            B values: 1 or 0; None where this reward does not apply; and a ValueError, which counts
            as raised for that completion, where the gold answer cannot be used.
        """
        pairs = [_pair(g, c) for g, c in zip(answer, completion, strict=True)]
        values = {pair: _compared(pair) for pair in pairs}
        hard = [pair for pair, value in values.items() if value is None]
        late: set[_Pair] = set()
        failed: set[_Pair] = set()
        for pair, outcome in zip(
            hard, self._map("equal", [p._asdict() for p in hard]), strict=True
        ):
            if outcome.error is None and outcome.value is None:
                values[pair] = _unusable(pair.gold)
                continue
            values[pair] = float(bool(outcome.value))
            if outcome.error is not None:
                (late if isinstance(outcome.error, TimeoutError) else failed).add(pair)
        log_metric("timeouts", sum(pair in late for pair in pairs))
        log_metric("worker_errors", sum(pair in failed for pair in pairs))
        return [
            None if gold is None else values[pair] for gold, pair in zip(answer, pairs, strict=True)
        ]

    def check_rows(
        self, answer: Sequence[Any], source: Sequence[Any] | None = None
    ) -> list[str | None]:
        """Say for each row why its gold answer cannot be used.

        A row without a gold answer cannot be used either. But if no row from the same source has a
        gold answer, this reward does not apply to that source and nothing is wrong.

        Args:
            answer: the gold answers of all rows.
            source: in a mixture of data sets, the name of the one that each row comes from.

        Returns:
            For each row the reason, or None if its gold answer can be used.
        """
        from tqdm import tqdm  # type: ignore[import-untyped]

        golds = [_gold(value) for value in answer]
        usable = {g: plain_number(g) is not None or plain_words(g) is not None for g in golds}
        hard = [g for g, is_plain in usable.items() if not is_plain and g and not is_prose(g)]
        chunks = [hard[i : i + _CHUNK] for i in range(0, len(hard), _CHUNK)]
        for chunk in tqdm(chunks, desc="gold answers", leave=False, disable=len(chunks) < 4):
            outcomes = self._map("usable", [{"gold": gold} for gold in chunk])
            usable |= {g: bool(o.value) for g, o in zip(chunk, outcomes, strict=True)}
        places = source or [None] * len(golds)
        graded = {place for place, value in zip(places, answer, strict=True) if value is not None}
        return [
            None
            if usable[gold] or (value is None and source and place not in graded)
            else str(_unusable(value))
            for gold, value, place in zip(golds, answer, places, strict=True)
        ]

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        r"""Return the final answers of B completions, for a majority vote.

        Answers that are equal after evaluation have the same spelling: `1/2`, `\frac{1}{2}` and
        `0.5` all become `1/2`. An answer that takes too long to evaluate stays as it was written.

        Args:
            completions: B texts.

        Returns:
            B answers; None where a completion has none.
        """
        given = [_answer(completion) for completion in completions]
        spelled: dict[tuple[str, bool], str | None] = {}
        hard = []
        for text, is_text in dict.fromkeys(given):
            number = None if is_text else plain_number(text)
            words = None if is_text or number is not None else plain_words(text)
            if number is None and words is None and text:
                hard.append((text, is_text))
            else:
                spelled[text, is_text] = str(number) if number is not None else words
        outcomes = self._map("canonical", [{"answer": a, "is_text": t} for a, t in hard])
        for key, outcome in zip(hard, outcomes, strict=True):
            text, is_text = key
            spelled[key] = outcome.value if outcome.error is None else None if is_text else text
        return [spelled[key] for key in given]

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        self.pool.close()

    def _map(self, method: str, calls: list[dict[str, Any]]) -> list[Outcome]:
        """Make all calls with a limit of a second; try those that overran it again, with more."""
        first = min(self.timeout_s, _FIRST_LIMIT_S)
        outcomes = self.pool.map(calls, first, method=method)
        slow = [i for i, o in enumerate(outcomes) if isinstance(o.error, TimeoutError)]
        if self.timeout_s > first:
            again = [calls[i] for i in slow]
            retried = self.pool.map(
                again, self.timeout_s, method=method, total_s=self.batch_timeout_s
            )
            for i, outcome in zip(slow, retried, strict=True):
                outcomes[i] = outcome
        return outcomes


class _Pair(NamedTuple):
    """A gold answer and a given one; equal pairs of a batch are compared only once."""

    gold: str
    answer: str
    is_text: bool


@lru_cache(maxsize=65536)
def _gold_of(text: str) -> str:
    found = final_answer(text)
    return normalized(text if found is None else found)


def _gold(value: Any) -> str:
    """The gold answer in the form that is compared; empty if it is neither text nor a number."""
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return _gold_of(str(value)) if isinstance(value, str | int | float) else ""


def _answer(completion: str) -> tuple[str, bool]:
    """The final answer and False; or the whole text and True if math-verify must search it."""
    found = final_answer(completion)
    if found is not None:
        return normalized(found), False
    text = after_thinking(completion).strip()
    return (normalized(text), False) if is_bare(text) else (text, True)


def _pair(gold: Any, completion: str) -> _Pair:
    wanted = _gold(gold)
    given, is_text = _answer(completion)
    return _Pair(wanted, given if is_text else as_list_like(wanted, given), is_text)


def _compared(pair: _Pair) -> float | ValueError | None:
    """The value of a pair; None if comparing it needs algebra."""
    if not pair.gold or is_prose(pair.gold):
        return _unusable(pair.gold)
    if not pair.answer or (is_run(pair.answer) and not pair.is_text):
        return 0.0
    if pair.is_text:
        return None
    words, given_words = plain_words(pair.gold), plain_words(pair.answer)
    if words is not None:
        return float(words == given_words)
    wanted, given = plain_number(pair.gold), plain_number(pair.answer)
    if wanted is None or given is None:
        return 0.0 if wanted is not None and given_words is not None else None
    if wanted == given:
        return 1.0
    return 0.0 if wanted.denominator == given.denominator == 1 else None


def _unusable(gold: Any) -> ValueError:
    return ValueError(
        f"the gold answer {gold!r} cannot be parsed as mathematics: correct it, leave its row out, "
        f"or map another column to 'answer' with data.init_args.columns"
    )
