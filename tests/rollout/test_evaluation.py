"""Validation metrics are means over prompts, by source, over batches and over processes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from logra_lightning.rollout.evaluation import EvalMetrics
from tests.two_processes import TwoProcesses

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
        "unscored_frac": 0.0,
    }
    assert {name: means[name] for name in expected} == pytest.approx(expected)
    assert list(means)[:9] == list(expected)
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
        "unscored_frac": 0.0,
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


def test_no_cast_of_the_module_rounds_them_and_no_state_dict_has_them() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eval_metrics = EvalMetrics()
            self.weight = nn.Parameter(torch.zeros(1))

    holder = Holder()
    rewards = torch.zeros(1001, 1)
    rewards[0] = 1
    for _ in range(2):
        metrics = holder.eval_metrics
        metrics.update(rewards, 1.0, rewards, rewards > 2, None, [None] * 1001)
        holder.to(torch.bfloat16)
    assert metrics.compute()["pass@1"] == 2 / 2002
    assert list(holder.state_dict()) == ["weight"]


def test_a_new_validation_starts_from_nothing() -> None:
    metrics = EvalMetrics([2])
    assert metrics.compute() == {}
    metrics.update(REWARDS, 1.0, LENGTHS, TRUNCATED, ANSWERS, ["a", "b"])
    metrics.reset()
    metrics.update(REWARDS[:, :2], 1.0, LENGTHS[:, :2], TRUNCATED[:, :2], None, [None, None])
    assert list(metrics.compute()) == [
        *("pass@1", "pass@2", "avg@2", "reward", "length", "truncated_frac", "unscored_frac")
    ]


def test_an_unscored_completion_is_left_out_and_counted() -> None:
    nan = math.nan
    # Of the scored ones: 1 of 3 succeeds, 1 of 2, none at all.
    rewards = torch.tensor([[1.0, 0.0, nan, 0.0], [nan, nan, 0.0, 1.0], [nan] * 4])
    answers = [["4", "5", "4", "5"], ["7", "7", "8", "9"], ["1", "1", "1", "1"]]
    zeros = torch.zeros(rewards.shape)
    metrics = EvalMetrics([2, 3])
    metrics.update(rewards, 1.0, zeros + 2, zeros > 0, answers, [None] * 3)
    assert metrics.compute() == pytest.approx(
        {
            "pass@1": (1 / 3 + 1 / 2) / 2,
            "pass@2": (2 / 3 + 1) / 2,  # of 3 completions, one draws the right one in 2 of 3 pairs
            "pass@3": 1.0,  # the second prompt has two, too few to tell
            "avg@4": (1 / 3 + 1 / 2) / 2,
            "maj@4": 0.0,  # 5 and 8, which is given before 9
            "reward": (1 / 3 + 1 / 2) / 2,
            "length": 2.0,
            "truncated_frac": 0.0,
            "unscored_frac": 7 / 12,
        }
    )


def test_a_validation_without_any_reward_has_no_success_to_tell() -> None:
    row = {"reward": None, "length": 2, "truncated": False, "answer": "7", "source": None}
    metrics = EvalMetrics()
    metrics.update_rows([row], 1, 1.0)
    means = metrics.compute()
    assert math.isnan(means["pass@1"])
    assert (means["unscored_frac"], means["length"]) == (1.0, 2.0)


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got -1"):
        EvalMetrics([4, -1])
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


def evaluate() -> None:
    process = torch.distributed.get_rank()
    # Process 0 sees one prompt of "a"; process 1 three, of "b" and "a".
    rewards = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]][process])
    sources = [["a"], ["b", "b", "a"]][process]
    metrics = EvalMetrics([2])
    zeros = torch.zeros(rewards.shape)
    metrics.update(rewards, 1.0, zeros + process, zeros > 0, None, sources)
    means = metrics.compute()
    expected = {"avg@2": 2.5 / 4, "a/avg@2": 0.75, "b/avg@2": 0.5, "length": 0.75, "b/length": 1.0}
    assert {name: means[name] for name in expected} == expected
    assert metrics.compute() == means

    metrics.reset()
    if process == 1:  # the other one has no prompt
        metrics.update(rewards, 1.0, zeros, zeros > 0, None, sources)
    assert metrics.compute()["pass@2"] == 2 / 3


@pytest.mark.dist
def test_processes_that_saw_other_sources_say_the_same(two_processes: TwoProcesses) -> None:
    two_processes.run(evaluate)
