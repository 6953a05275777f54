"""GymScore gives what the reasoning-gym task itself gives."""

from __future__ import annotations

import pytest

from logra_lightning.rewards import GymScore, Reward, score
from logra_lightning.types import PromptBatch

reasoning_gym = pytest.importorskip("reasoning_gym")


def rows() -> list[dict]:
    from reasoning_gym.composite import DatasetSpec

    specs = [
        DatasetSpec(name="chain_sum", weight=1, config={}),
        DatasetSpec(name="letter_counting", weight=1, config={}),
    ]
    return list(reasoning_gym.create_dataset("composite", datasets=specs, size=8, seed=0))


def test_the_right_answer_scores_one_and_a_wrong_one_less() -> None:
    assert {row["metadata"]["source_dataset"] for row in rows()} == {"chain_sum", "letter_counting"}
    for row in rows():
        assert GymScore()(row["answer"], **row) == 1.0
        assert GymScore()("-123456", **row) < 1.0


def test_the_last_match_of_the_pattern_is_the_answer() -> None:
    row = rows()[0]
    reward = GymScore(r"<answer>(.*?)</answer>")
    text = f"I think <answer>7</answer>, no: <answer> {row['answer']} </answer>"
    assert reward(text, **row) == 1.0
    assert reward(row["answer"], **row) == 0.0


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        GymScore("(")


def test_answers_are_what_the_pattern_finds() -> None:
    texts = ["<answer> 7 </answer> or <answer>8</answer>", "9"]
    assert GymScore("<answer>(.*?)</answer>").answers(texts) == ["8", None]
    assert GymScore().answers([" 7\n", ""]) == ["7", ""]


def test_it_works_with_a_time_limit_that_importing_the_tasks_would_overrun() -> None:
    chosen = rows()[:2]
    columns = {name: [row[name] for row in chosen] for name in ("question", "answer", "metadata")}
    prompts = PromptBatch([[1], [2]], columns, rows=[0, 1])
    texts = [chosen[0]["answer"], "-123456", "-123456", chosen[1]["answer"]]
    reward = Reward(GymScore(), timeout_s=0.5)
    total = score([reward], prompts, texts, [[1]] * 4).total
    assert total[[0, 3]].tolist() == [1.0, 1.0]
    assert (total[[1, 2]] < 1).all()
    reward._pool.close()  # type: ignore[union-attr]
