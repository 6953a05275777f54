"""Rows are filtered and counted at setup; refills leave the order of training alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from logra_lightning.data import Rows, SourceRows, TokenizedDataModule
from tests.conftest import TINY_POLICY
from tests.data.rows import ROWS, ready, save_chat_tokenizer


class Fixed(TokenizedDataModule):
    """Rows of a list."""

    def __init__(self, train: Any = ROWS, val: Any = (), **options: Any) -> None:
        super().__init__(**({"tokenizer": str(TINY_POLICY), "prompts_per_step": 2} | options))
        self.given = train, val

    def load_rows(self) -> tuple[Rows, Rows]:
        return self.given


class TwoSources(TokenizedDataModule):
    """Two parts of other columns, trained on by the shares 3 to 1."""

    weights = (3.0, 1.0)

    def load_sources(self) -> tuple[list[SourceRows], list[SourceRows]]:
        sums = SourceRows("sums", ROWS)
        others = SourceRows("others", [{"q": "1", "gold": 1}, {"q": "2", "gold": 2}], "q")
        return [sums, others], []


def test_prompts_are_tokenized_and_columns_come_along() -> None:
    data = ready(Fixed(ROWS[:7], ROWS[7:]))
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    (batch, *_) = data.val_dataloader()
    assert batch.prompt_ids == [tokenizer(row["prompt"])["input_ids"] for row in ROWS[7:]]
    assert batch.columns["answer"] == ["14", "16", "18"]
    assert batch.columns["level"] == [{"a": [7]}, {"a": [8]}, {"a": [9]}]
    assert batch.columns["source"] == ["Fixed"] * 3
    assert sorted(data.columns) == ["answer", "level", "prompt", "source"]
    assert data.longest_prompt == len(batch.prompt_ids[0])


def test_a_column_called_source_is_the_users_own() -> None:
    data = ready(Fixed([{"prompt": "1", "source": "page 3"}, {"prompt": "2", "source": None}]))
    assert [row["source"] for row in data.train.rows] == ["page 3", None]


def test_columns_are_the_union_of_sources_and_none_where_one_has_none() -> None:
    data = ready(TwoSources(str(TINY_POLICY), prompts_per_step=4))
    assert data.columns == ["prompt", "answer", "level", "source", "q", "gold"]
    batch = data.train.batch([0, 11])
    assert batch.columns["answer"] == ["0", None]
    assert batch.columns["gold"] == [None, 2]
    assert batch.columns["source"] == ["sums", "others"]
    for batch in data.train_dataloader():
        assert batch.columns["source"].count("sums") == 3


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


def test_a_subclass_without_rows_is_told_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="must define load_rows or load_sources"):
        TokenizedDataModule(str(TINY_POLICY)).setup("fit")


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
    with pytest.raises(ValueError, match="prompt_template .* must name columns"):
        Fixed(prompt_template="{}")
    with pytest.raises(ValueError, match="must be at least 1"):
        Fixed(max_prompt_tokens=0)


def test_a_template_with_unknown_columns_is_refused_at_setup() -> None:
    with pytest.raises(
        ValueError, match="names 'gold', but training row 0 has only 'prompt', 'answer', 'level'"
    ):
        ready(Fixed(prompt_template="{prompt} {gold}"))


def long_row(terms: int) -> dict[str, Any]:
    return {"prompt": "1 + " * terms + "1 =", "answer": str(terms + 1), "level": None}


# The tiny policy reads characters, and puts <bos> before them: 4 * 10 + 3 + 1 = 44 tokens.
LONG = [*ROWS[:3], long_row(10), *ROWS[3:]]


def test_overlong_prompts_are_an_error_with_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"1 of 11 training prompts .* max_prompt_tokens=20; the longest, row 3, has 44 "
        r"tokens: raise the limit or set data.init_args.overlong_prompts=drop",
    ):
        ready(Fixed(LONG, max_prompt_tokens=20))


def test_overlong_prompts_are_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data = ready(Fixed(LONG, max_prompt_tokens=20, overlong_prompts="drop"))
    assert "1 of 11 training prompts" in caplog.text
    assert "Dropped row 3." in caplog.text
    assert [row["answer"] for row in data.train.rows] == [row["answer"] for row in ROWS]
    assert data.train.numbers == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def odd_answers(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Answers are twice the row's number: those with 4 and 8 fall out."""
    return {i: "no gold" for i, row in enumerate(rows) if row["answer"] in ("8", "16", None)}


def test_unusable_rows_are_an_error_with_reasons() -> None:
    data = ready(Fixed())
    with pytest.raises(
        ValueError,
        match=r"2 of 10 training rows cannot be used: row 4 \(no gold\), row 8 \(no gold\): mend "
        r"them or set data.init_args.unusable_rows=drop",
    ):
        data.leave_out(odd_answers)
    assert len(data.train) == 10
    with pytest.raises(ValueError, match=r"1 of 1 validation rows cannot be used: row 0"):
        ready(Fixed(ROWS[:3], ROWS[8:9])).leave_out(odd_answers)


def test_unusable_rows_are_left_out_of_both_sets_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = ready(Fixed(LONG, ROWS[7:], max_prompt_tokens=20, overlong_prompts="drop"))
    data.unusable_rows = "drop"
    with caplog.at_level("INFO"):
        data.leave_out(odd_answers)
    assert "2 of 10 training rows cannot be used. Dropped row 5 (no gold), row 9" in caplog.text
    assert "1 of 3 validation rows cannot be used. Dropped row 1 (no gold)." in caplog.text
    assert data.train.numbers == [0, 1, 2, 4, 6, 7, 8, 10]
    assert [row["answer"] for row in data.val.rows] == ["14", "18"]
    caplog.clear()
    data.leave_out(odd_answers)
    assert caplog.text == ""


def test_many_rows_are_counted_but_not_all_named() -> None:
    with pytest.raises(ValueError, match=r"10 of 10 .*row 0 \(no\), .*row 9 \(no\): mend"):
        ready(Fixed()).leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))
    data = ready(Fixed(ROWS * 2))
    with pytest.raises(ValueError, match=r"20 of 20 .*row 9 \(no\), \.\.\.: mend"):
        data.leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))


def test_rows_of_several_sources_are_named_by_source() -> None:
    data = ready(TwoSources(str(TINY_POLICY)))
    with pytest.raises(ValueError, match=r"row 8 of 'sums' \(no gold\), row 0 of 'others'"):
        data.leave_out(odd_answers)


def test_a_training_source_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 10 training rows of 'Fixed' is left"):
        ready(Fixed(max_prompt_tokens=3, overlong_prompts="drop"))
    data = ready(Fixed(unusable_rows="drop"))
    with pytest.raises(ValueError, match="none of the 10 training rows of 'Fixed' is left"):
        data.leave_out(lambda rows: dict.fromkeys(range(len(rows)), "no"))
    data = ready(TwoSources(str(TINY_POLICY), unusable_rows="drop"))
    with pytest.raises(ValueError, match="none of the 2 training rows of 'others' is left"):
        data.leave_out(odd_answers)


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


@pytest.mark.parametrize(("limit", "shown"), [(9, True), (10, False)])
def test_many_prompts_have_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: int, shown: bool
) -> None:
    monkeypatch.setattr("logra_lightning.data.module._PROGRESS_FROM", limit)
    ready(Fixed())
    assert ("training prompts" in capsys.readouterr().err) is shown
