"""Data sets are mixed by weight, each in an order of its own, and validated on one by one."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from logra_lightning.data import GymSource, GymSpec, MixedDataModule, PromptSource
from tests.conftest import TINY_POLICY
from tests.data.rows import ROWS, ready, save_chat_tokenizer, write

pytestmark = pytest.mark.usefixtures("private_datasets_cache")

WORDS = [{"question": f"{i} - {i} =", "gold": 0, "meta": {"i": i}} for i in range(30)]


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return write(tmp_path / "sums.jsonl", ROWS)


@pytest.fixture
def words(tmp_path: Path) -> str:
    return write(tmp_path / "words.jsonl", WORDS)


def mix(sources: list[PromptSource], **options: Any) -> MixedDataModule:
    return MixedDataModule(
        sources, **({"tokenizer": str(TINY_POLICY), "prompts_per_step": 4} | options)
    )


def sources(sums: str, words: str) -> list[PromptSource]:
    return [
        PromptSource(sums, weight=3.0),
        PromptSource(words, prompt_column="question", columns={"answer": "gold"}),
    ]


def test_each_batch_holds_the_shares_with_the_columns_of_all(sums: str, words: str) -> None:
    data = ready(mix(sources(sums, words)))
    assert set(data.columns) == {"prompt", "answer", "level", "source", "question", "meta"}
    batches = list(data.train_dataloader())
    assert len(batches) == 10
    for batch in batches:
        assert Counter(batch.columns["source"]) == {"sums": 3, "words": 1}
        for source, level, question, meta in zip(
            *(batch.columns[name] for name in ("source", "level", "question", "meta")), strict=True
        ):
            if source == "sums":
                assert isinstance(level["a"], list)
                assert question is meta is None
            else:
                assert level is None
                assert question == f"{meta['i']} - {meta['i']} ="


@pytest.mark.parametrize("stop", [3, 10, 14])
def test_a_resumed_mix_is_the_one_that_never_stopped(sums: str, words: str, stop: int) -> None:
    """Ten batches an epoch, thirty prompts of the ten sums: three passes of theirs in each."""
    straight = ready(mix(sources(sums, words))).train_dataloader()
    expected = [batch.rows for _ in range(2) for batch in straight]
    assert len(expected) == 20

    first = ready(mix(sources(sums, words))).train_dataloader()
    taken: list[list[int]] = []
    while len(taken) < stop:
        for batch in first:
            taken.append(batch.rows)
            if len(taken) == stop:
                break
    again = ready(mix(sources(sums, words))).train_dataloader()
    again.load_state_dict(first.state_dict())
    while len(taken) < 20:
        taken += [batch.rows for batch in islice(again, 20 - len(taken))]
    assert taken == expected
    of_sums = [row for batch in taken for row in batch if row < 10]
    for i in range(0, 60, 10):
        assert sorted(of_sums[i : i + 10]) == list(range(10))


def test_validation_has_sources_of_its_own_and_held_out_rows(sums: str, words: str) -> None:
    data = ready(
        mix(
            [PromptSource(sums, val_size=2)],
            val_sources=[
                PromptSource(words, prompt_column="question", split="test[:3]", label="eval")
            ],
        )
    )
    assert (len(data.train), len(data.val)) == (8, 5)
    (batch,) = data.val_dataloader()
    assert batch.columns["source"] == ["sums", "sums", "eval", "eval", "eval"]
    assert batch.columns["answer"] == ["16", "18", None, None, None]
    assert batch.columns["gold"] == [None, None, 0, 0, 0]
    assert {name for b in data.train_dataloader() for name in b.columns} == set(batch.columns)


def test_prompts_are_made_as_their_source_says(tmp_path: Path, sums: str, words: str) -> None:
    messages = write(
        tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "5"}]}, {"prompt": "6"}]
    )
    data = ready(
        mix(
            [
                PromptSource(sums, system_prompt="1", split="train[3:5]"),
                PromptSource(words, prompt_template="0 + {question}", split="train[3:5]"),
                PromptSource(messages),
            ],
            tokenizer=save_chat_tokenizer(tmp_path / "chat"),
            system_prompt="2",
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    texts = ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in data.train.prompt_ids]
    assert texts == [
        "7=18=3 + 3 =-",
        "7=18=4 + 4 =-",
        "7=28=0 + 3 - 3 =-",
        "7=28=0 + 4 - 4 =-",
        "7=28=5-",
        "7=28=6-",
    ]


def test_reasoning_gym_is_one_more_source(sums: str) -> None:
    pytest.importorskip("reasoning_gym")
    tasks = [GymSpec("chain_sum"), GymSpec("spell_backward")]
    gym = GymSource(tasks, weight=1.0, size=20, val_size=4)
    data = ready(mix([PromptSource(sums, weight=1.0)], gym=gym, prompts_per_step=6))
    batches = list(data.train_dataloader())
    assert len(batches) == 5
    for batch in batches:
        assert batch.columns["source"].count("sums") == 3
        for source, metadata in zip(
            batch.columns["source"], batch.columns["metadata"], strict=True
        ):
            assert (metadata or {"source_dataset": "sums"})["source_dataset"] == source
    assert len(data.val) == 4
    assert {row["source"] for row in data.val.rows} <= {"chain_sum", "spell_backward"}


def test_refills_come_by_weight(sums: str, words: str) -> None:
    data = ready(mix(sources(sums, words)))
    drawn = [data.refill(1, seed).columns["source"][0] for seed in range(800)]
    assert abs(drawn.count("sums") / 800 - 3 / 4) < 0.06  # four standard deviations


def test_mistakes_are_refused_by_name(sums: str, words: str) -> None:
    with pytest.raises(ValueError, match="data.init_args.sources is empty"):
        mix([])
    with pytest.raises(ValueError, match="two sources are called 'sums': set their labels"):
        mix([PromptSource(sums), PromptSource(sums)])
    with pytest.raises(ValueError, match="two sources are called 'words'"):
        mix([PromptSource(words, val_size=1)], val_sources=[PromptSource(words)])
    with pytest.raises(ValueError, match=r"val_sources\[0\]: val_size holds .*test\[:100\]"):
        mix([PromptSource(sums)], val_sources=[PromptSource(words, val_size=1)])
    with pytest.raises(ValueError, match=r"args.sources\[0\]: 'x' needs .* got -1.0 and 0"):
        mix([PromptSource("x", weight=-1.0)])
    with pytest.raises(ValueError, match=r"val_sources\[0\]: 'x' .* got 1.0 and -1"):
        mix([PromptSource(sums)], val_sources=[PromptSource("x", val_size=-1)])
    with pytest.raises(ValueError, match=r"sources\[1\]: prompt_template .* must name columns"):
        mix([PromptSource(sums), PromptSource("x", prompt_template="{}")])
    with pytest.raises(ValueError, match="data.init_args.gym: tasks is empty"):
        mix([PromptSource(sums)], gym=GymSource([]))
    with pytest.raises(
        ValueError,
        match=r"^data.init_args.sources\[1\]: training row 0 of 'words' has no column 'prompt', "
        r"only 'question', 'gold', 'meta', 'source': set prompt_column$",
    ):
        ready(mix([PromptSource(sums), PromptSource(words)]))
    wrong = PromptSource(words, columns={"a": "gld"})
    with pytest.raises(ValueError, match=r"data.init_args.val_sources\[0\]: columns names 'gld'"):
        ready(mix([PromptSource(sums)], val_sources=[wrong]))
    data = ready(
        mix([PromptSource(sums), PromptSource(words, prompt_column="question", weight=1e-3)])
    )
    with pytest.raises(ValueError, match="weight of source 'words' is so small"):
        data.train_dataloader()
