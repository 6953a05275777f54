"""Functions of every kind are called to their values; what goes wrong is named or counted."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from logra_lightning.rewards import Reward, Scores, exact_match, log_metric, score
from logra_lightning.types import PromptBatch
from tests.rewards.calls import pool_functions

PROMPTS = PromptBatch(
    [[1], [2, 3]],
    {"answer": ["4", "5"], "meta": [{"deep": [1, None]}, None]},
    rows=[10, 20],
)
TEXTS = ["4", " 4 ", "5", "four"]
IDS = [[4], [4, 0], [5], [9, 9]]
ONE = PromptBatch([[1]], {"answer": ["4"]}, rows=[7])


@pytest.fixture(scope="module")
def limited() -> Iterator[Reward]:
    reward = Reward(pool_functions.reward, on_error="zero", timeout_s=1.0)
    yield reward
    reward._pool.close()  # type: ignore[union-attr]


def scored(reward: Reward, *texts: str) -> Scores:
    return score([reward], ONE, texts, [[1]] * len(texts))


def test_a_batched_function_is_called_once_with_lists() -> None:
    seen = []

    def spy(
        completion: list, answer: list, meta: list, completion_ids: list, prompt_ids: list
    ) -> list[float]:
        log_metric("size", len(completion))
        seen.append((completion, answer, meta, completion_ids, prompt_ids))
        return [float(c.strip() == a) for c, a in zip(completion, answer, strict=True)]

    scores = score([Reward(spy, batched=True, weight=2.0)], PROMPTS, TEXTS, IDS)
    meta = [{"deep": [1, None]}] * 2 + [None] * 2
    assert seen == [(TEXTS, ["4", "4", "5", "5"], meta, IDS, [[1], [1], [2, 3], [2, 3]])]
    assert scores.total.tolist() == [2.0, 2.0, 2.0, 0.0]
    assert scores.metrics == {"rewards/spy/size": 4.0}


def test_a_function_can_say_that_it_is_batched() -> None:
    class Lengths:
        batched = True

        def __call__(self, completion: list[str]) -> torch.Tensor:
            return torch.tensor([len(text) for text in completion])

    assert score([Reward(Lengths())], PROMPTS, TEXTS, IDS).total.tolist() == [1.0, 3.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("value", "found"),
    [([1.0, 2.0], "2 values"), (0.5, "0.5"), ([], r"\[\]"), ("abcd", "4 values")],
)
def test_a_wrong_number_of_values_names_both_numbers(value: object, found: str) -> None:
    reward = Reward(lambda completion: value, name="short", batched=True)
    with pytest.raises(ValueError, match=f"'short' returned {found} for 4 completions"):
        score([reward], PROMPTS, TEXTS, IDS)


def test_one_value_of_a_batch_may_be_missing_or_an_error() -> None:
    def some(completion: list[str]) -> list:
        return [1.0, None, ValueError("not this one"), 0.5]

    other = Reward(lambda completion: 0.0, name="other")
    with pytest.warns(UserWarning, match="raised ValueError for row 20, completion '5': not this"):
        scores = score([Reward(some, batched=True, on_error="zero"), other], PROMPTS, TEXTS, IDS)
    assert scores.total.tolist() == [1.0, 0.0, 0.0, 0.5]
    assert scores.by_name["some"].isnan().tolist() == [False, True, False, False]
    assert scores.metrics == {"rewards/some/errors": 1.0}


def test_async_calls_of_a_batch_run_at_the_same_time() -> None:
    waiting = 0
    most = 0

    async def crowd(completion: str) -> float:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.05)
        waiting -= 1
        log_metric("length", len(completion))
        return float(completion)

    scores = scored(Reward(crowd), "1", "2", "30")
    assert scores.total.tolist() == [1.0, 2.0, 30.0]
    assert most == 3
    assert scores.metrics == {"rewards/crowd/length": 4 / 3}


def test_objects_partial_functions_and_batches_may_be_async() -> None:
    class Judge:
        async def __call__(self, completion: str) -> float:
            return float(completion)

    async def scaled(completion: str, factor: float) -> float:
        return factor * float(completion)

    async def batch(completion: list[str]) -> list[float]:
        log_metric("size", len(completion))
        return [float(text) for text in completion]

    for function in (Judge(), partial(scaled, factor=1.0)):
        assert scored(Reward(function, name="x"), "1", "2").total.tolist() == [1.0, 2.0]
    scores = scored(Reward(batch, batched=True), "1", "2")
    assert scores.total.tolist() == [1.0, 2.0]
    assert scores.metrics == {"rewards/batch/size": 2.0}


def test_async_functions_work_where_a_loop_is_running_and_keep_theirs_between_batches() -> None:
    loops = []

    async def remember(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return float(completion)

    async def notebook() -> Scores:
        return scored(Reward(remember), "1", "2")

    assert asyncio.run(notebook()).total.tolist() == [1.0, 2.0]
    assert scored(Reward(remember), "3").total.tolist() == [3.0]
    assert len(set(map(id, loops))) == 1


def test_async_functions_see_the_context_of_the_caller() -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    variable.set(3.0)

    async def look(completion: str) -> float:
        return variable.get()

    assert scored(Reward(look), "x").total.tolist() == [3.0]


def test_an_async_call_that_overruns_is_cancelled_and_counted() -> None:
    reward = Reward(pool_functions.awaited, on_error="zero", timeout_s=0.5)
    started = time.monotonic()
    with pytest.warns(UserWarning, match="'awaited' overran its time limit for row 7.*'900'"):
        scores = scored(reward, "1", "900", "2", "wrong")
    assert time.monotonic() - started < 10
    assert scores.total.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert scores.metrics == {
        "rewards/awaited/errors": 1.0,
        "rewards/awaited/timeouts": 1.0,
        "rewards/awaited/length": (1 + 3 + 1 + 5) / 4,
    }


def test_a_call_that_hangs_here_ends_and_is_named() -> None:
    def hang(completion: str) -> float:
        while completion == "hang":
            time.sleep(60)
        return 1.0

    async def awaited(completion: str) -> float:
        await asyncio.sleep(600 if completion == "hang" else 0)
        return 1.0

    async def blocking(completion: str) -> float:  # keeps the loop to itself
        time.sleep(2.0 if completion == "hang" else 0)
        return 1.0

    for function in (hang, awaited, blocking):
        with pytest.raises(
            RuntimeError, match=f"'{function.__name__}' overran .* row 7, .* 'hang'"
        ):
            scored(Reward(function, hang_s=0.3), "ok", "hang", "ok")
    reward = Reward(hang, hang_s=0.3, on_error="zero")
    with pytest.warns(UserWarning, match="'hang' overran its time limit"):
        scores = scored(reward, "ok", "hang", "ok")
    assert scores.total.tolist() == [1.0, 0.0, 1.0]
    assert scores.metrics == {"rewards/hang/errors": 1.0}


def test_limits_of_its_own_come_before_that_of_hanging() -> None:
    class Own:
        timeout_s = 3.0

        def __call__(self, completion: str) -> float:
            time.sleep(0.5)
            return 1.0

    assert scored(Reward(Own(), hang_s=0.1), "x").total.tolist() == [1.0]
    reward = Reward(pool_functions.awaited, timeout_s=30.0, hang_s=0.1)
    assert scored(reward, "5").total.tolist() == [5.0]


def test_an_error_stops_the_run_and_names_reward_row_and_completion() -> None:
    calls = []

    def fragile(completion: str) -> float:
        calls.append(completion)
        return 1 / (len(completion) - 100)

    text = "a" * 100
    with pytest.raises(
        RuntimeError,
        match=r"'fragile' raised ZeroDivisionError for row 7, completion 'a{80}\.\.\.'",
    ) as caught:
        scored(Reward(fragile), "b", text, "c")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert calls == ["b", text]


def test_errors_score_zero_are_counted_and_warned_about_once() -> None:
    def fragile(completion: str) -> object:
        return {"good": 1.0, "nan": math.nan}.get(completion) or 1 / 0

    reward = Reward(fragile, weight=3.0, on_error="zero")
    with pytest.warns(UserWarning, match="'fragile' returned nan for row 7"):
        scores = scored(reward, "good", "nan", "bad")
    assert scores.total.tolist() == [3.0, 0.0, 0.0]
    assert scores.metrics == {"rewards/fragile/errors": 2.0}
    # A second warning would be an error here.
    assert scored(reward, "bad", "good").metrics == {"rewards/fragile/errors": 1.0}
    assert scored(reward, "good").metrics == {"rewards/fragile/errors": 0.0}


def test_calls_with_a_time_limit_cannot_hang_crash_or_fail_the_batch(limited: Reward) -> None:
    scored(limited, "0")
    misdeeds = ["hang", "count", "raise", "exit", "crash", "nonsense"]
    started = time.monotonic()
    with pytest.warns(UserWarning, match="'reward' overran its time limit for row 7"):
        scores = scored(limited, "1.5", *misdeeds, "2")
    assert time.monotonic() - started < 10
    assert scores.total.tolist() == [1.5, *[0.0] * 6, 2.0]
    metrics = scores.metrics
    assert metrics["rewards/reward/timeouts"] == 2.0
    assert metrics["rewards/reward/errors"] == 4.0
    # What died noted nothing that could still be read.
    assert metrics["rewards/reward/length"] == (3 + len("raise") + len("nonsense") + 1) / 4
    assert scored(limited, "nothing").total.isnan().tolist() == [True]


def test_a_time_limit_holds_in_a_thread_too(limited: Reward) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(scored(limited, "1", "2")))
    thread.start()
    thread.join()
    assert found[0].total.tolist() == [1.0, 2.0]


def test_an_overrun_that_is_not_to_score_zero_stops_the_run() -> None:
    batch = Reward(pool_functions.batched, batched=True, timeout_s=1.0)
    scores = scored(batch, "1", "2")
    assert scores.total.tolist() == [1.0, 2.0]
    assert scores.metrics == {"rewards/batched/size": 2.0}
    with pytest.raises(RuntimeError, match="'batched' overran its time limit for row 7, .* '1'"):
        scored(batch, "1", "hang")
    batch._pool.close()  # type: ignore[union-attr]


def test_a_reward_with_processes_can_be_copied(limited: Reward) -> None:
    for other in (copy.deepcopy(limited), pickle.loads(pickle.dumps(limited))):
        assert scored(other, "1").total.tolist() == [1.0]
        other._pool.close()


def local() -> Callable[..., float]:
    return lambda completion: 0.0


def test_options_that_cannot_work_are_refused() -> None:
    class Own:
        timeout_s = 3.0

        def __call__(self, completion: str) -> float:
            return 0.0

    with pytest.raises(ValueError, match="'<lambda>' has timeout_s: .* define it at the top of"):
        Reward(local(), timeout_s=1.0)
    with pytest.raises(
        ValueError, match="timeout_s of reward 'exact_match' must be above 0, got 0"
    ):
        Reward(exact_match, timeout_s=0.0)
    with pytest.raises(ValueError, match="hang_s of reward 'exact_match' must be above 0, got -1"):
        Reward(exact_match, hang_s=-1)
    with pytest.raises(ValueError, match="'Own' has time limits of its own: set timeout_s of its"):
        Reward(Own(), timeout_s=1.0)
    with pytest.raises(ValueError, match="must be raise or zero, got 'ignore'"):
        Reward(exact_match, on_error="ignore")  # type: ignore[arg-type]


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="must be callable, got 'exact_match'"):
        Reward("exact_match")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the weight of reward 'exact_match' is nan"):
        Reward(exact_match, weight=math.nan)
