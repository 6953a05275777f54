"""Where a model is loaded from: a folder or the hub, with the same options for all its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Options of every `from_pretrained` that say where files come from and what they may do.
_OPTIONS = (
    "revision",
    "code_revision",
    "subfolder",
    "cache_dir",
    "local_files_only",
    "force_download",
    "trust_remote_code",
    "token",
)


def hub_options(model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return those of a model's options that hold for its tokenizer and configs too.

    `{"revision": "v2", "attn_implementation": "eager"}` gives `{"revision": "v2"}`.

    Args:
        model_kwargs: options of `from_pretrained`; None stands for none.
    """
    return {name: value for name, value in (model_kwargs or {}).items() if name in _OPTIONS}


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


@contextmanager
def one_line_errors(path: str) -> Iterator[None]:
    """Within it, what `transformers` cannot load is told in one line, with what to do about it.

    Args:
        path: folder or hub name, as the user gave it.

    Raises:
        ValueError: in place of the errors of `transformers`, `huggingface_hub` and of libraries
            that a model needs and that are not installed.
    """
    try:
        yield
    except (OSError, ImportError, ValueError, KeyError) as error:
        raise ValueError(f"the model {path!r} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first sentence of an error of the libraries, or our own words where they need a word."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it comes with code of its own; if you trust that code, set model.model_kwargs to "
            "{trust_remote_code: true} (of an export, --trust_remote_code=true)"
        )
    if "couldn't connect" in text or "offline mode" in text or "LocalEntryNotFound" in text:
        return (
            "it is neither a folder nor in the cache, and the hub cannot be reached: mend the name "
            "(model.model), download it where there is a network, or name a folder"
        )
    sentence = text.split(". ")[0].rstrip(".:") or type(error).__name__
    return f"{sentence}: check model.model and model.model_kwargs"
