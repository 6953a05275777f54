"""collect keeps groups together and replaces those without signal; evaluate gives plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from logra_lightning.objective import GRPO, Advantage
from logra_lightning.rewards import Reward, exact_match
from logra_lightning.rollout import DynamicSampling, Sampler, collect, evaluate
from logra_lightning.types import Completion, PromptBatch, SamplingParams
from tests.quiet_engine import QuietEngine


class Scripted(QuietEngine):
    """An engine that answers each call from a list."""

    def __init__(self, *calls: list[list[list[int]]]) -> None:
        self.calls = list(calls)
        self.asked: list[tuple] = []

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        num_completions: int,
        seed: int,
    ) -> list[list[Completion]]:
        self.asked.append((list(prompt_ids), sampling, num_completions, seed))
        return [
            [
                Completion(ids, torch.full((len(ids),), -1.0), truncated=len(ids) > 2)
                for ids in group
            ]
            for group in self.calls.pop(0)
        ]


def sampler(engine: Scripted, group_size: int = 2, temperature: float = 1.0) -> Sampler:
    return Sampler(
        engine=engine,
        decode=lambda ids: [str(i[0]) for i in ids],
        rewards=[Reward(exact_match)],
        sampling=SamplingParams(3, temperature),
        group_size=group_size,
    )


def prompts(*numbers: int) -> PromptBatch:
    """Prompt i asks for i."""
    return PromptBatch(
        [[n] for n in numbers], {"answer": [str(n) for n in numbers]}, rows=list(numbers)
    )


def test_groups_stand_together_and_rewards_see_their_own_row() -> None:
    engine = Scripted([[[7], [8, 8, 8]], [[8], [7, 7]]])
    rollouts = collect(prompts(7, 8), sampler=sampler(engine), advantage=GRPO(), seed=5)
    assert engine.asked == [([[7], [8]], SamplingParams(3), 2, 5)]
    assert list(rollouts.prompt_ids) == [[7], [7], [8], [8]]
    assert rollouts.rows == [7, 7, 8, 8]
    assert rollouts.rewards.tolist() == [1, 0, 1, 0]
    assert rollouts.rewards_by_name["exact_match"].tolist() == [1, 0, 1, 0]
    assert rollouts.advantages.sign().tolist() == [1, -1, 1, -1]
    assert rollouts.num_completion_tokens == 1 + 3 + 1 + 2
    assert rollouts.truncated.tolist() == [False, True, False, False]
    assert rollouts.metrics["rollout/reward"] == 0.5
    assert rollouts.metrics["rollout/zero_advantage_frac"] == 0.0


RIGHT_AND_WRONG = [[1], [2]]


class Refill:
    """Prompts 1, 1, 1 ... and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, seed: int) -> PromptBatch:
        self.asked.append((count, seed))
        return prompts(*[1] * count)


def dynamic(
    engine: Scripted,
    refill: Refill | None,
    max_refills: int,
    seed: int = 3,
    advantage: Advantage | None = None,
) -> Any:
    return collect(
        prompts(1, 1, 1),
        sampler=sampler(engine),
        advantage=advantage or GRPO(),
        seed=seed,
        dynamic_sampling=DynamicSampling(max_refills),
        refill=refill,
    )


def test_groups_without_signal_are_replaced_until_the_batch_is_full() -> None:
    same, refill = [[9], [9]], Refill()
    engine = Scripted([same, RIGHT_AND_WRONG, same], [same, RIGHT_AND_WRONG], [RIGHT_AND_WRONG])
    rollouts = dynamic(engine, refill, max_refills=5)
    assert [count for count, _ in refill.asked] == [2, 1]
    assert len(rollouts) == 6
    assert (rollouts.advantages != 0).all()
    assert rollouts.metrics["rollout/dropped_groups"] == 3
    assert rollouts.metrics["rollout/refills"] == 2
    # Of all that was sampled: three groups of half, three of none.
    assert rollouts.metrics["rollout/reward"] == pytest.approx(0.25)
    assert rollouts.metrics["rollout/zero_variance_frac"] == pytest.approx(0.5)
    # Every draw has a seed of its own.
    assert len({seed for *_, seed in engine.asked} | {seed for _, seed in refill.asked}) == 5


def test_refills_are_bounded_and_the_step_is_made_with_what_there_is() -> None:
    same, refill = [[9], [9]], Refill()
    engine = Scripted([same, RIGHT_AND_WRONG, same], [same, same])
    rollouts = dynamic(engine, refill, max_refills=1)
    assert len(rollouts) == 2
    assert rollouts.metrics["rollout/dropped_groups"] == 4


def test_without_refills_groups_are_only_dropped() -> None:
    engine = Scripted([[[9], [9]], RIGHT_AND_WRONG, [[1], [1]]])
    assert len(dynamic(engine, None, max_refills=0)) == 2


def test_a_batch_without_any_signal_stays_whole_and_has_no_advantage() -> None:
    same = [[9], [9]]
    engine = Scripted([same] * 3, [same] * 3)
    rollouts = dynamic(engine, Refill(), max_refills=1)
    assert len(rollouts) == 12
    assert (rollouts.advantages == 0).all()
    assert rollouts.metrics["rollout/dropped_groups"] == 6


class Spread(Advantage):
    """The reward itself, and what it was asked about."""

    def __init__(self) -> None:
        self.seen: list[list[list[float]]] = []

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        self.seen.append(rewards.tolist())
        return rewards


def test_advantages_see_everything_that_was_sampled_and_dropped_groups_have_none() -> None:
    advantage, same = Spread(), [[1], [1]]
    engine = Scripted([same, RIGHT_AND_WRONG, same], [same, RIGHT_AND_WRONG])
    rollouts = dynamic(engine, Refill(), max_refills=1, advantage=advantage)
    assert advantage.seen == [[[1, 1], [1, 0], [1, 1], [1, 1], [1, 0]]]
    assert rollouts.advantages.tolist() == [1, 0, 1, 0]
    none_differ = dynamic(Scripted([same] * 3), None, max_refills=0, advantage=Spread())
    assert none_differ.advantages.tolist() == [0] * 6


@pytest.mark.parametrize(
    "wrong", [lambda r: r.t(), lambda r: r.reshape(-1), lambda r: 0.5, lambda r: r / 0]
)
def test_advantages_of_another_shape_are_refused_by_name(wrong: Any) -> None:
    class Wrong(Advantage):
        """Not what it should be."""

        def __call__(self, rewards: torch.Tensor) -> Any:
            return wrong(rewards)

    engine = Scripted([RIGHT_AND_WRONG] * 3)
    with pytest.raises(
        ValueError, match=r"model.objective.advantage Wrong must return finite .*\[3, 2\]"
    ):
        dynamic(engine, None, max_refills=0, advantage=Wrong())


def when_known(completion: str, answer: str) -> float | None:
    """1 or 0; None, which is no reward, for an answer of 9."""
    return None if completion == "9" else float(completion == answer)


def test_unscored_completions_have_no_advantage_and_a_group_needs_two_scored() -> None:
    nine = [[9], [9]]
    engine = Scripted([[[1], [9]], [[1], [2]], nine])
    own = replace(sampler(engine), rewards=[Reward(when_known)])
    rollouts = collect(prompts(1, 1, 1), sampler=own, advantage=GRPO(), seed=0)
    assert rollouts.rewards.isnan().tolist() == [False, True, False, False, True, True]
    assert rollouts.advantages.sign().tolist() == [0, 0, 1, -1, 0, 0]
    assert rollouts.metrics["rollout/unscored_frac"] == 0.5

    engine = Scripted([[[1], [9]], [[1], [2]], nine])
    own = replace(sampler(engine), rewards=[Reward(when_known)])
    kept = collect(
        prompts(1, 1, 1),
        sampler=own,
        advantage=GRPO(),
        seed=0,
        dynamic_sampling=DynamicSampling(0),
    )
    assert kept.rewards.tolist() == [1, 0]
    assert kept.metrics["rollout/dropped_groups"] == 2


def test_an_advantage_may_return_anything_where_there_is_no_reward() -> None:
    engine = Scripted([[[1], [9]]])
    own = replace(sampler(engine), rewards=[Reward(when_known)])
    rollouts = collect(prompts(1), sampler=own, advantage=Spread(), seed=0)
    assert rollouts.advantages.tolist() == [1, 0]


def test_evaluation_rows_say_none_where_no_reward_applies() -> None:
    engine = Scripted([[[7], [9]]])
    own = replace(sampler(engine), rewards=[Reward(when_known)])
    assert [row["reward"] for row in evaluate(prompts(7), sampler=own, seed=1)] == [1.0, None]


def test_the_same_seed_asks_for_the_same_prompts() -> None:
    asked = []
    for seed in (3, 3, 4):
        refill = Refill()
        engine = Scripted([[[9], [9]]] * 3, [RIGHT_AND_WRONG] * 3)
        dynamic(engine, refill, max_refills=1, seed=seed)
        asked.append((refill.asked, [seed for *_, seed in engine.asked]))
    assert asked[0] == asked[1] != asked[2]


def test_evaluation_rows_hold_plain_values() -> None:
    engine = Scripted([[[7]], [[7, 7, 7]]])
    batch = PromptBatch([[1], [2, 2]], {"answer": ["7", "8"], "source": ["a", "b"]}, [5, 6])
    rows = evaluate(batch, sampler=sampler(engine, 1, temperature=0.0), seed=1)
    shared = {"completion": "7", "answer": "7"}
    assert rows == [
        {"row": 5, "source": "a", "prompt": "1", "reward": 1.0, "length": 1, "truncated": False}
        | shared,
        {"row": 6, "source": "b", "prompt": "2", "reward": 0.0, "length": 3, "truncated": True}
        | shared,
    ]
    assert engine.asked[0][2:] == (1, 1)
