"""Tokenizers come from where their model does."""

from __future__ import annotations

from pathlib import Path

import pytest

from logra_lightning.tokenizer import load_tokenizer
from tests.conftest import TINY_POLICY


def test_options_of_the_model_hold_for_its_tokenizer_too(tmp_path: Path) -> None:
    load_tokenizer(str(TINY_POLICY)).save_pretrained(tmp_path / "part")
    found = load_tokenizer(str(tmp_path), subfolder="part", attn_implementation="eager")
    assert found.vocab_size == load_tokenizer(str(TINY_POLICY)).vocab_size


def test_a_folder_without_a_tokenizer_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
