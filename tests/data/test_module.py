"""Rows are tokenized and counted at setup; refills leave the order of training alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from logra_lightning.data import SourceRows, TokenizedDataModule
from tests.conftest import TINY_POLICY
from tests.data.rows import ROWS, Fixed, TwoSources, ready, save_chat_tokenizer


def test_prompts_are_tokenized_and_columns_come_along() -> None:
    data = ready(Fixed(ROWS[:7], ROWS[7:]))
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    (batch, *_) = data.val_dataloader()
    assert batch.prompt_ids == [tokenizer(row["prompt"])["input_ids"] for row in ROWS[7:]]
    assert batch.columns["answer"] == ["14", "16", "18"]
    assert batch.columns["level"] == [{"a": [7]}, {"a": [8]}, {"a": [9]}]
    assert batch.columns["source"] == ["Fixed"] * 3
    assert sorted(data.columns) == ["answer", "level", "prompt", "source"]


def test_the_longest_prompt_and_the_largest_token_are_found_in_both_sets() -> None:
    data = ready(Fixed([{"prompt": "1"}, {"prompt": "9 9"}, {"prompt": "8 8"}], [{"prompt": "1"}]))
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    assert data.largest(len) == (len(tokenizer("9 9")["input_ids"]), "training row 1")
    data = ready(Fixed([{"prompt": "1"}], [{"prompt": "2"}, {"prompt": "9"}]))
    assert data.largest(max) == (max(tokenizer("9")["input_ids"]), "validation row 1")
    data.train = data.val = data.train.without({0})
    assert data.largest(len) == (0, "no row")


def test_columns_are_the_union_of_sources_and_none_where_one_has_none() -> None:
    data = ready(TwoSources(str(TINY_POLICY), prompts_per_step=4))
    assert data.columns == ["prompt", "answer", "level", "source", "q", "gold"]
    batch = data.train.batch([0, 11])
    assert batch.columns["answer"] == ["0", None]
    assert batch.columns["gold"] == [None, 2]
    assert batch.columns["source"] == ["sums", "others"]
    batches = list(data.train_dataloader())
    assert [batch.columns["source"].count("sums") for batch in batches] == [3, 3, 3]


def test_rewards_may_ask_only_for_columns_of_both_sets() -> None:
    data = ready(Fixed([{"prompt": "1", "answer": "1"}], [{"prompt": "2"}]))
    assert data.columns == ["prompt", "source"]


def test_validation_prompts_that_are_trained_on_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        ready(Fixed(ROWS[:7], ROWS[5:]))
    assert "2 of 5 validation prompts are also training prompts" in caplog.text
    caplog.clear()
    ready(Fixed(ROWS[:7], ROWS[7:]))
    assert caplog.text == ""


def test_a_subclass_is_told_what_to_define() -> None:
    class Old(TokenizedDataModule):
        def load_sources(self) -> None: ...

    with pytest.raises(NotImplementedError, match="TokenizedDataModule must define load_rows"):
        TokenizedDataModule(str(TINY_POLICY)).setup("fit")
    with pytest.raises(ValueError, match="Old.load_sources is called load_rows now: rename it"):
        Old(str(TINY_POLICY))


@pytest.mark.parametrize("first", [0, 1])
def test_rows_and_sources_of_rows_are_not_mixed(first: int) -> None:
    both = [SourceRows("sums", ROWS), ROWS[0]]
    with pytest.raises(ValueError, match=r"load_rows returns (SourceRows together with dict|such)"):
        ready(Fixed([both[first], both[1 - first]]))


def test_template_arguments_that_cannot_be_given_are_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="data.init_args: chat_template_kwargs has return_dict"):
        Fixed(chat_template_kwargs={"return_dict": False})


def test_templates_and_system_prompt_are_used(tmp_path: Path) -> None:
    data = ready(
        Fixed(
            [{"a": "1", "b": [{"role": "user", "content": "2"}]}],
            tokenizer=save_chat_tokenizer(tmp_path / "chat"),
            prompt_template="{a} + {b[0][content]}",
            system_prompt="9",
            chat_template_kwargs={"thinking": True},
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    tokens = tokenizer.convert_ids_to_tokens(data.train.prompt_ids[0])
    assert "".join(tokens) == "7=98=1 + 2+"


def test_a_tokenizer_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_chat_tokenizer(tmp_path / "chat")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(ready(Fixed(tokenizer="~/chat")).train) == 10


def test_a_bad_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="overlong_prompts must be error or drop, got 'cut'"):
        Fixed(overlong_prompts="cut")
    with pytest.raises(ValueError, match="unusable_rows must be error or drop, got 'keep'"):
        Fixed(unusable_rows="keep")
    with pytest.raises(ValueError, match="data.init_args: prompt_template .* must name columns"):
        Fixed(prompt_template="{}")
    with pytest.raises(ValueError, match="must be at least 1"):
        Fixed(max_prompt_tokens=0)


def test_a_template_with_unknown_columns_is_refused_at_setup() -> None:
    with pytest.raises(
        ValueError, match="names 'gold', but training row 0 has only 'prompt', 'answer', 'level'"
    ):
        ready(Fixed(prompt_template="{prompt} {gold}"))


def test_refills_are_other_prompts_by_the_seed_alone() -> None:
    data = ready(Fixed())
    torch.manual_seed(0)
    first = data.refill(4, seed=3)
    torch.rand(1)
    assert first.rows == data.refill(4, seed=3).rows
    assert len(set(first.rows)) == 4
    assert first.columns["answer"] == [str(2 * row) for row in first.rows]
    assert {tuple(data.refill(4, seed=s).rows) for s in range(20)} != {tuple(first.rows)}
    assert sorted(data.refill(10, seed=0).rows) == list(range(10))
    with pytest.raises(ValueError, match="cannot draw 11 different prompts from 10"):
        data.refill(11, seed=0)


def test_refills_leave_the_loader_where_it_is() -> None:
    expected = [batch.rows for batch in ready(Fixed()).train_dataloader()]
    data = ready(Fixed())
    loader = data.train_dataloader()
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.rows)
        state = loader.state_dict()
        data.refill(3, seed=number)
        assert loader.state_dict() == state
    assert seen == expected
