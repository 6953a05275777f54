"""Loads the tokenizer of a model, for the data and for the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub name.

    Raises:
        ValueError: `path` looks like a folder that is not there.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checked_path(path))


def pad_token_id(tokenizer: Any) -> int:
    """A token to fill rows with; masks come from lengths, so any will do."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0


def checked_path(path: str) -> str:
    """A hub name as it is, a folder in full; ValueError where the folder is not there."""
    full = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and "/" in path and not full.is_dir():
        raise ValueError(
            f"there is no model folder {path!r}: set model.model (of an export, --model) to a "
            f"folder or a hub name"
        )
    return str(full) if path.startswith("~") else path
