"""Loads the tokenizer of a model, for the data and for the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a model.

    Args:
        path: folder or hub name of the model.

    Raises:
        ValueError: `path` looks like a folder, and there is no such folder.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checked_path(path))


def pad_token_id(tokenizer: Any) -> int:
    """Return a token id to fill rows with: the padding token, else the end of sequence, else 0.

    Which token it is does not matter: masks are made of lengths, never of token values.
    """
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0


def checked_path(path: str) -> str:
    """Return a model's path for `transformers`: `~` is expanded, all else stays as it is.

    Raises:
        ValueError: `path` looks like a folder, and there is no such folder. (Without this check, it
            would be looked up on the hub.)
    """
    full = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and "/" in path and not full.is_dir():
        raise ValueError(
            f"there is no model folder {path!r}: set model.model (of an export, --model) to a "
            f"folder or a hub name"
        )
    return str(full) if path.startswith("~") else path
