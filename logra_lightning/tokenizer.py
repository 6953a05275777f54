"""Loads the tokenizer of a model, for the data and for the policy."""

from __future__ import annotations

from typing import Any

from logra_lightning.hub import checked_path, hub_options, one_line_errors


def load_tokenizer(path: str, **model_kwargs: Any) -> Any:
    """Return the tokenizer of a model.

    Args:
        path: folder or hub name of the model.
        model_kwargs: options of the model; those of `hub_options` hold for its tokenizer too.

    Raises:
        ValueError: there is no such folder, or it has no tokenizer that `transformers` can load.
    """
    from transformers import AutoTokenizer

    full = checked_path(path)
    with one_line_errors(path):
        return AutoTokenizer.from_pretrained(full, **hub_options(model_kwargs))
