"""The metrics equal their textbook formulas, by source, over batches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from logra_lightning.metrics import (
    AverageAtN,
    EvalMetrics,
    MajorityAtN,
    PassAtK,
    majority_at_n,
    pass_at_k,
)
from tests.runs import run_ranks


def with_successes(c: int, n: int) -> torch.Tensor:
    """[1, n] bool, the first c true."""
    return (torch.arange(n) < c).view(1, n)


def exact(n: int, c: int, k: int) -> float:
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


@pytest.mark.parametrize("k", [1, 2, 10, 500, 999, 1000])
def test_pass_at_k_is_exact_for_a_thousand_completions(k: int) -> None:
    for c in (0, 1, 2, 10, 499, 500, 501, 990, 999, 1000):
        value = pass_at_k(with_successes(c, 1000), k).item()
        assert value == pytest.approx(exact(1000, c, k), rel=1e-12, abs=1e-15), c


def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_success() -> None:
    successes = torch.tensor([[False, True, False, True, False]])
    draws = [any(draw) for draw in combinations(successes[0].tolist(), 3)]
    assert pass_at_k(successes, 3).item() == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_a_mean_over_prompts_of_all_batches() -> None:
    metric = PassAtK(2)
    metric.update(torch.tensor([[True, False, False], [False, False, False]]))
    metric.update(torch.tensor([[True, True, True, True]]))
    # 1 - C(2,2)/C(3,2) = 2/3, then 0 and 1
    assert metric.compute().item() == pytest.approx((2 / 3 + 0 + 1) / 3)
    metric.reset()
    metric.update(torch.tensor([[False, False]]))
    assert metric.compute().item() == 0.0


def test_more_tries_than_completions_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="got k=8 and 4 completions"):
        PassAtK(8).update(torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PassAtK(0)
    with pytest.raises(ValueError, match="at least 1, got -1"):
        EvalMetrics([4, -1])


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.ones(3) > 0, torch.ones(2, 0) > 0])
def test_what_is_not_a_table_of_successes_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[prompts, completions\] bool"):
        AverageAtN().update(bad)


def test_the_average_is_over_completions_then_prompts() -> None:
    metric = AverageAtN()
    metric.update(torch.tensor([[True, False], [True, True]]))
    metric.update(torch.tensor([[False, False, False]]))
    assert metric.compute().item() == pytest.approx((0.5 + 1 + 0) / 3)


@pytest.mark.parametrize(
    ("answers", "successes", "expected"),
    [
        (["4", "5", "4"], [True, False, True], 1.0),
        (["5", "5", "4"], [False, False, True], 0.0),
        (["5", "4", "4", "5"], [False, True, True, False], 0.0),  # of equals the first
        (["4", "5", "5", "4"], [True, False, False, True], 1.0),
        ([None, None, "4"], [False, False, True], 1.0),  # None has no vote
        ([None, None], [True, True], 0.0),
        (["4", "4", "4", "5"], [True, False, True, False], 2 / 3),  # the answer alone is not all
    ],
)
def test_the_majority_is_right_or_wrong(
    answers: Sequence[str | None], successes: list[bool], expected: float
) -> None:
    assert majority_at_n(torch.tensor([successes]), [answers]).item() == pytest.approx(expected)


def test_the_majority_is_a_mean_over_prompts_and_needs_all_answers() -> None:
    metric = MajorityAtN()
    metric.update(torch.tensor([[True, False], [False, True]]), [["1", "2"], ["1", "2"]])
    assert metric.compute().item() == 0.5
    with pytest.raises(ValueError, match=r"2 completions of 1 prompts, got lists of \[1\]"):
        metric.update(torch.tensor([[True, False]]), [["1"]])


class Holder(nn.Module):
    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric
        self.eval_metrics = EvalMetrics([2])
        self.weight = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "float", "set_dtype"])
def test_no_cast_rounds_a_metric_and_no_state_dict_has_it(cast: str) -> None:
    holder = Holder(AverageAtN())
    counted = torch.zeros(1001, 3, dtype=torch.bool)
    counted[0, 0] = True
    holder.metric.update(counted)
    if cast == "to":
        holder.to(torch.bfloat16)
    elif cast == "set_dtype":
        holder.metric.set_dtype(torch.bfloat16)
    else:
        getattr(holder, cast)()
    holder.metric.update(counted)
    assert holder.metric.compute().item() == 2 / 3 / 2002
    holder.metric.reset()
    holder.metric.update(counted)
    assert holder.metric.compute().item() == pytest.approx(1 / 3 / 1001, rel=1e-15)
    assert list(holder.state_dict()) == ["weight"]


# EvalMetrics.

REWARDS = torch.tensor([[1.0, 0.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.25]])
LENGTHS = torch.tensor([[1, 2, 3, 4], [10, 10, 10, 30]])
TRUNCATED = torch.tensor([[False] * 4, [False, False, True, True]])
ANSWERS = [["4", "5", "4", None], ["7", "8", "8", "8"]]


def test_a_validation_has_all_its_numbers() -> None:
    metrics = EvalMetrics([4, 2])
    metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["sums", None])
    means = metrics.compute()
    # the first prompt succeeds in 2 of 4, the second never
    expected = {
        "pass@1": 0.25,
        "pass@2": (1 - 1 / 6) / 2,
        "pass@4": 0.5,
        "avg@4": 0.25,
        "maj@4": 0.5,
        "reward": (3.5 / 4 + 0.25 / 4) / 2,
        "length": (2.5 + 15) / 2,
        "truncated_frac": 0.25,
    }
    assert {name: means[name] for name in expected} == pytest.approx(expected)
    assert list(means)[:8] == list(expected)
    # the row without a source counts in the total alone
    assert {name for name in means if "/" in name} == {f"sums/{name}" for name in expected}
    assert means["sums/pass@2"] == pytest.approx(1 - 1 / 6)
    assert means["sums/length"] == 2.5


def test_one_completion_has_no_average_and_one_source_no_heading() -> None:
    metrics = EvalMetrics([])
    for row in range(2):
        one = [values[row : row + 1, :1] for values in (REWARDS, LENGTHS, TRUNCATED)]
        metrics.update(one[0], 1.0, one[1], one[2], [["4"]], ["sums"])
    assert metrics.compute() == {
        "pass@1": 0.5,
        "reward": 0.5,
        "length": 5.5,
        "truncated_frac": 0.0,
    }


def test_sources_have_their_own_means_and_without_answers_there_is_no_majority() -> None:
    metrics = EvalMetrics([4])
    metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, None, ["a", "b"])
    metrics.update(REWARDS[:1], 1.0, LENGTHS[:1], TRUNCATED[:1], None, ["b"])
    means = metrics.compute()
    assert means["a/avg@4"] == 0.5
    assert means["b/avg@4"] == 0.25
    assert means["avg@4"] == pytest.approx(1 / 3)
    assert means["b/length"] == (15 + 2.5) / 2
    assert not [name for name in means if "maj" in name]


def test_a_new_validation_starts_from_nothing() -> None:
    metrics = EvalMetrics([2])
    assert metrics.compute() == {}
    metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["a", "b"])
    metrics.reset()
    metrics.update(REWARDS[:, :2], 1.0, LENGTHS[:, :2], TRUNCATED[:, :2], None, [None, None])
    assert list(metrics.compute()) == [
        *("pass@1", "pass@2", "avg@2", "reward", "length", "truncated_frac")
    ]


def test_inputs_that_do_not_fit_are_refused() -> None:
    metrics = EvalMetrics([2])
    with pytest.raises(ValueError, match=r"\[\[2, 4\], \[2, 4\], \[2, 4\]\] and 1 sources"):
        metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["a"])
    with pytest.raises(ValueError, match=r"\[\[2, 4\], \[2, 2\], \[2, 4\]\] and 2 sources"):
        metrics.update(REWARDS, 1.0, LENGTHS[:, :2], TRUNCATED, ANSWERS, ["a", "b"])
    with pytest.raises(ValueError, match="got k=8 and 4 completions"):
        EvalMetrics([8]).update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["a", "b"])
    metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["a", "b"])
    with pytest.raises(ValueError, match="got 2 after 4"):
        metrics.update(REWARDS[:, :2], 1.0, LENGTHS[:, :2], TRUNCATED[:, :2], None, ["a", "b"])


RANKS = """
import torch
from torch import distributed
from logra_lightning.metrics import EvalMetrics, PassAtK

distributed.init_process_group("gloo")
rank = distributed.get_rank()

# Rank 0 sees one prompt of "a"; rank 1 three, of "b" and "a".
rewards = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]][rank])
sources = [["a"], ["b", "b", "a"]][rank]
metrics = EvalMetrics([2])
zeros = torch.zeros(rewards.shape)
metrics.update(rewards, 1.0, zeros + rank, zeros > 0, None, sources)
means = metrics.compute()
expected = {"avg@2": 2.5 / 4, "a/avg@2": 0.75, "b/avg@2": 0.5, "length": 0.75, "b/length": 1.0}
for name, value in expected.items():
    assert means[name] == value, (name, means)
assert metrics.compute() == means

# One without any prompt.
metrics.reset()
if rank == 1:
    metrics.update(rewards, 1.0, zeros, zeros > 0, None, sources)
assert metrics.compute()["pass@2"] == 2 / 3

metric = PassAtK(2)
metric.update(rewards == 1)
assert metric.compute().item() == 0.75
print("done")
distributed.destroy_process_group()
"""


@pytest.mark.dist
def test_ranks_that_saw_other_sources_say_the_same(tmp_path: Path) -> None:
    run_ranks(RANKS, tmp_path)
