"""collect keeps groups together and hands every part what it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from logra_lightning.objective import GRPO
from logra_lightning.rewards import Reward, exact_match
from logra_lightning.rollout import collect, evaluate
from logra_lightning.types import Completion, PromptBatch, SamplingParams


class Scripted:
    """An engine that answers from a list."""

    def __init__(self, groups: list[list[list[int]]]) -> None:
        self.groups = groups
        self.asked: list[tuple] = []

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None: ...

    def close(self) -> None: ...

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
            for group in self.groups
        ]


def test_groups_stand_together_and_rewards_see_their_own_row() -> None:
    engine = Scripted([[[7], [8, 8, 8]], [[8], [7, 7]]])
    sampling = SamplingParams(3)
    rollouts = collect(
        PromptBatch([[1], [2, 2]], {"answer": ["7", "8"]}),
        engine=engine,
        decode=lambda ids: [str(i[0]) for i in ids],
        rewards=[Reward(exact_match)],
        advantage=GRPO(),
        sampling=sampling,
        group_size=2,
        seed=5,
    )
    assert engine.asked == [([[1], [2, 2]], sampling, 2, 5)]
    assert list(rollouts.prompt_ids) == [[1], [1], [2, 2], [2, 2]]
    assert rollouts.rewards.tolist() == [1, 0, 1, 0]
    assert rollouts.rewards_by_name["exact_match"].tolist() == [1, 0, 1, 0]
    assert rollouts.advantages.sign().tolist() == [1, -1, 1, -1]
    assert rollouts.num_completion_tokens == 1 + 3 + 1 + 2
    assert rollouts.truncated.tolist() == [False, True, False, False]


def test_evaluation_rows_hold_plain_values() -> None:
    engine = Scripted([[[7]], [[7, 7, 7]]])
    rows = evaluate(
        PromptBatch([[1], [2, 2]], {"answer": ["7", "8"]}, [5, 6]),
        engine=engine,
        decode=lambda ids: [str(i[0]) for i in ids],
        rewards=[Reward(exact_match)],
        sampling=SamplingParams(3, temperature=0.0),
        seed=1,
    )
    assert rows == [
        {"row": 5, "prompt": "1", "completion": "7", "reward": 1.0}
        | {"length": 1, "truncated": False},
        {"row": 6, "prompt": "2", "completion": "7", "reward": 0.0}
        | {"length": 3, "truncated": True},
    ]
    assert engine.asked[0][2:] == (1, 1)
