"""Rows of sources become token ids, and errors say which source and row."""

from __future__ import annotations

import pytest

from logra_lightning.data import SourceRows
from logra_lightning.data.encode import PromptEncoder
from logra_lightning.data.source_rows import tokenized
from tests.data.rows import Fixed, ready, word_tokenizer


def test_sources_stand_one_after_the_other() -> None:
    def encoder_of(source: SourceRows) -> PromptEncoder:
        return PromptEncoder(word_tokenizer(), "x", prompt_column=source.prompt_column)

    first = SourceRows("a", [{"prompt": "one"}, {"prompt": "two"}])
    second = SourceRows("b", [{"q": "two", "source": 7}], "q", typed_at="data.sources[1]")
    prompts = tokenized([first, second], encoder_of, "training")
    assert prompts.prompt_ids == [[0, 3], [0, 4], [0, 4]]
    assert prompts.numbers == [0, 1, 2]
    assert prompts.parts == [("a", 0), ("b", 2)]
    assert [row["source"] for row in prompts.rows] == ["a", "a", "7"]
    wrong = SourceRows("b", [{"q": "two"}, {"r": "two"}], "q", typed_at="data.sources[1]")
    with pytest.raises(
        ValueError,
        match=r"^data\.sources\[1\]: training row 1 of 'b' has no column 'q', only 'r': set ",
    ):
        tokenized([first, wrong], encoder_of, "training")


def test_a_column_called_source_is_the_users_own() -> None:
    data = ready(Fixed([{"prompt": "1", "source": "page 3"}, {"prompt": "2", "source": None}]))
    assert [row["source"] for row in data.train.rows] == ["page 3", None]


@pytest.mark.parametrize(("limit", "shown"), [(9, True), (10, False)])
def test_many_prompts_have_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: int, shown: bool
) -> None:
    monkeypatch.setattr("logra_lightning.data.source_rows._PROGRESS_FROM", limit)
    ready(Fixed())
    assert ("training prompts" in capsys.readouterr().err) is shown
