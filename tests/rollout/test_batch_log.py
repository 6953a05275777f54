"""A batch's numbers: phases add up, and many truncated completions are told once."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest
import torch

from logra_lightning.rollout.batch_log import BatchLog
from logra_lightning.types import Completion, Rollouts

CPU = torch.device("cpu")


def rollouts(truncated: float) -> Rollouts:
    completions = [Completion([1], torch.zeros(1), truncated=False)]
    metrics = {"rollout/truncated_frac": truncated, "rollout/samples": 1.0}
    return Rollouts([[1]], completions, torch.zeros(1), {}, torch.zeros(1), metrics=metrics)


def unscored(share: float) -> Rollouts:
    none = rollouts(0.0)
    rewards = {"correct": torch.zeros(1)}
    return replace(
        none, rewards_by_name=rewards, metrics=none.metrics | {"rollout/unscored_frac": share}
    )


def one_step(log: BatchLog) -> None:
    log.stats.begin_step()
    log.stats.add("loss/policy", torch.tensor(0.5))


def test_phases_add_up_and_a_new_batch_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 31.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    log = BatchLog()
    log.begin_batch()
    for name in ("train", "update", "train"):
        with log.phase(name, CPU):
            pass
    one_step(log)
    values = log.values(rollouts(0.0), 6)
    times = {name: value for name, value in values.items() if name.startswith("time/")}
    assert times == {"time/train_s": 5.0, "time/update_s": 2.0, "time/step_s": 7.0}
    assert values["loss/policy"] == 0.5
    assert values["rollout/truncated_frac"] == 0.0
    log.begin_batch()
    with log.phase("train", CPU):
        pass
    one_step(log)
    assert log.values(rollouts(0.0), 6)["time/step_s"] == 1.0


def test_many_truncated_completions_are_told_of_the_first_batch_alone() -> None:
    for first, second, told in ((0.5, 0.5, 1), (0.25, 0.5, 0)):
        log = BatchLog()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for truncated in (first, second):
                log.begin_batch()
                one_step(log)
                log.values(rollouts(truncated), 6)
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == told
        assert all("50% of the first batch" in m and "max_tokens=6" in m for m in messages)


def test_tokens_without_a_logprob_are_told_once() -> None:
    log = BatchLog()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for invalid in (0.0, 3.0, 2.0):
            log.begin_batch()
            one_step(log)
            counts = {"mismatch/invalid_tokens": invalid, "rollout/tokens": 9.0}
            batch = rollouts(0.0)
            values = log.values(replace(batch, metrics={**batch.metrics, **counts}), 6)
            assert values["mismatch/invalid_tokens"] == invalid
    assert [str(warning.message)[:58] for warning in caught] == [
        "the engine returned no finite logprob for 3 of 9 tokens of"
    ]


def test_the_first_batch_without_any_reward_is_told() -> None:
    log = BatchLog()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for share in (0.9, 1.0, 1.0):
            log.begin_batch()
            one_step(log)
            log.values(unscored(share), 6)
    (message,) = [str(warning.message) for warning in caught]
    assert "nothing is trained on a batch: correct returned None for all" in message
