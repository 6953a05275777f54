"""What stands before the end of the thinking is no answer."""

from __future__ import annotations

import pytest

from logra_lightning.rewards import GymScore, Reward, exact_match, voted_answers
from logra_lightning.rewards.thinking import after_thinking


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 5 ", " 5 "),
        ("<think>4</think> 5", " 5"),
        ("4</think> 5", " 5"),
        ("<think>3</think> 4 <think>no</think>5", "5"),
        ("<Thinking>4</THINKING>5", "5"),
        ("<think>4", ""),
        ("<think>3</think>4<think>5", ""),
        ("<think>4</think>", ""),
    ],
)
def test_the_answer_stands_after_the_last_thought(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


def test_other_rewards_and_votes_look_there_too() -> None:
    texts = ["<think>4</think> 5\n", "<think>5", "5"]
    assert [exact_match(text, 5) for text in texts] == [1.0, 0.0, 1.0]
    assert voted_answers([Reward(exact_match)], texts) == ["5", None, "5"]
    tagged = ["<think><a>4</a></think><a>5</a>", "<a>4</a></think>5"]
    assert GymScore("<a>(.*?)</a>").answers(tagged) == ["5", None]
    assert GymScore().answers(tagged) == ["<a>5</a>", "5"]


def test_a_worker_that_loads_a_reward_alone_looks_there_too() -> None:
    reward = Reward(exact_match, timeout_s=20.0)
    (outcome,) = reward.call([{"completion": "<think>4</think>5", "answer": "5"}])
    assert outcome.value == 1.0
    reward._pool.close()  # type: ignore[union-attr]
