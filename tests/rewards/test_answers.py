"""Rewards are asked which rows they cannot score, and what completions answer."""

from __future__ import annotations

from logra_lightning.rewards import GymScore, Reward, exact_match, unusable_rows, voted_answers

ROWS = [{"answer": "4", "level": 1}, {"answer": "?", "level": 2}, {"answer": "?", "level": 3}]


class Levels:
    def __call__(self, completion: str, answer: str) -> float:
        return 0.0

    def check_rows(self, level: list[int]) -> list[str | None]:
        return ["too hard" if value == 3 else None for value in level]


class Golds:
    def __call__(self, completion: str, answer: str) -> float:
        return 0.0

    def check_rows(self, answer: list[str]) -> list[str | None]:
        return ["unknown" if gold == "?" else None for gold in answer]


class Wholesale:
    def __call__(self, completion: str) -> float:
        return 0.0

    def check_rows(self, **columns: list) -> list[str | None]:
        return [f"has {sorted(columns)}" if level == 1 else None for level in columns["level"]]


class NoRows:
    def __call__(self, completion: str) -> float:
        return 0.0

    def check_rows(self, answer: list[str]) -> list[str | None]:
        raise AssertionError("asked about no rows")


def test_each_row_has_the_first_reason_against_it() -> None:
    rewards = [Reward(exact_match), Reward(Levels()), Reward(Golds(), name="known")]
    assert unusable_rows(rewards, ROWS) == {
        1: "reward 'known': unknown",
        2: "reward 'Levels': too hard",
    }
    assert list(unusable_rows(rewards, ROWS)) == [1, 2]


def test_columns_are_given_by_name() -> None:
    assert unusable_rows([Reward(Wholesale())], ROWS) == {
        0: "reward 'Wholesale': has ['answer', 'level']"
    }


def test_without_checks_or_rows_all_is_usable() -> None:
    assert unusable_rows([Reward(exact_match)], ROWS) == {}
    assert unusable_rows([Reward(NoRows())], []) == {}


def test_the_first_reward_that_knows_answers_gives_those_voted_on() -> None:
    first, second = GymScore("<a>(.*?)</a>"), GymScore("<b>(.*?)</b>")
    texts = ["<a>1</a> <b>2</b>", " 3 "]
    rewards = [Reward(exact_match), Reward(first), Reward(second, name="other")]
    assert voted_answers(rewards, texts) == ["1", None]
    assert voted_answers(rewards[:1], texts) == ["<a>1</a> <b>2</b>", "3"]
