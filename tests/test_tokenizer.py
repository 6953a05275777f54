"""Tokenizers come from folders or the hub; a folder that is missing is no hub name."""

from __future__ import annotations

from pathlib import Path

import pytest

from logra_lightning.tokenizer import checked_path, load_tokenizer, pad_token_id
from tests.conftest import TINY_POLICY


def test_a_hub_name_stays_and_a_home_folder_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert checked_path("~/models/tiny") == str(tmp_path / "models" / "tiny")
    assert checked_path("gpt2") == "gpt2"
    assert checked_path("owner/model") == "owner/model"
    assert checked_path(str(TINY_POLICY)) == str(TINY_POLICY)


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere", "/nowhere/model", "a/b/c"])
def test_a_folder_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"there is no model folder '{path}': set model.model"):
        load_tokenizer(path)


def test_the_token_to_fill_rows_with_is_the_first_that_there_is() -> None:
    tokenizer = load_tokenizer(str(TINY_POLICY))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert pad_token_id(tokenizer) == 0
