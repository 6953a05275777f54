"""`export_checkpoint`: the policy of a checkpoint as a folder for `transformers` and vLLM."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from logra_lightning.checkpoints.checkpoint_io import read_checkpoint
from logra_lightning.checkpoints.newest import checkpoint_at
from logra_lightning.hub import checked_path
from logra_lightning.policy.hf_folder import (
    MAX_SHARD_BYTES,
    DType,
    Layout,
    Written,
    check_output_dir,
    write_folder,
)
from logra_lightning.policy.load import load_config
from logra_lightning.policy.other_parts import layout_of
from logra_lightning.sketch.projection import canonical_name
from logra_lightning.tokenizer import load_tokenizer


def export_checkpoint(
    ckpt_path: str,
    output_dir: str,
    model: str | None = None,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
) -> Written:
    """Write the policy of a checkpoint as a Hugging Face folder, for transformers and vLLM.

    The checkpoint is read weight by weight. It does not matter with which strategy it was trained.

    Args:
        ckpt_path: file that a run saved, or a folder, which stands for the newest checkpoint in it
            or below it.
        output_dir: folder to write; it must not exist yet, or must be empty.
        model: folder or hub name that the run started from; needed only where that folder has been
            moved since.
        dtype: dtype of the written weights; `auto` keeps the dtype that the trainer computes with.
        trust_remote_code: run the code that comes with the model's tokenizer. It is asked for anew,
            because a checkpoint may be somebody else's. The run's revision and other options are
            in the checkpoint; an access token is not.

    Returns:
        The folder, its size and its dtype.

    Raises:
        ValueError: there is no such checkpoint, it does not hold a policy, or the folder cannot be
            written.
    """
    check_output_dir(output_dir)
    checkpoint = _read(checkpoint_at(ckpt_path))
    weights = _policy_weights(checkpoint, ckpt_path)
    source = checkpoint.get("policy_source")
    where = _where(source, ckpt_path, model)
    # Of another folder or hub name, the revision and the rest need not exist.
    options = source["options"] if source is not None and model is None else {}
    options = options | {"trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(where, **options)
    config, generation_config = _configs(source, where, options, model)
    layout = layout_of(config, where, options)
    layout.check(weights)
    for name, other in layout.ties.items():
        if name in weights and not torch.equal(weights[name], weights[other]):
            raise ValueError(f"{name!r} and {other!r} are tied by the config, but differ")
    return write_folder(
        output_dir,
        layout,
        _shown(weights, layout),
        tokenizer=tokenizer,
        generation_config=generation_config or layout.generation_config,
        dtype=dtype,
        max_shard_bytes=MAX_SHARD_BYTES,
    )


def _read(path: Path) -> dict[str, Any]:
    """Read the checkpoint; its tensors stay in the file until they are used."""
    if path.is_dir():
        raise ValueError(
            f"ckpt_path {str(path)!r} is a folder: export reads checkpoints of one file, which "
            f"ModelParallelStrategy saves with save_distributed_checkpoint=false"
        )
    try:
        found = read_checkpoint(path)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"ckpt_path {str(path)!r} holds more than tensors and plain data, and opening it could "
            f"run code of others: save the module without objects in its hyper-parameters"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise ValueError(f"ckpt_path {str(path)!r} is not a checkpoint of Lightning")
    return found


def _policy_weights(checkpoint: dict[str, Any], path: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint["state_dict"] if name.startswith("policy.")]
    if not names:
        raise ValueError(
            f"checkpoint {path!r} has no policy: export reads those of PolicyModule, and of "
            f"modules whose language model is their attribute `policy`"
        )
    return {
        canonical_name(name.removeprefix("policy.")): checkpoint["state_dict"][name]
        for name in names
    }


def _configs(
    source: dict[str, Any] | None, where: str, options: Mapping[str, Any], model: str | None
) -> tuple[Any, Any]:
    """The policy's config, and its generation config (None for the default one)."""
    from transformers import CONFIG_MAPPING, GenerationConfig

    if source is None:
        return _configs_of(where, options)
    saved = json.loads(source["config"])
    if saved["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model of the type {saved['model_type']!r}")
    config = CONFIG_MAPPING[saved["model_type"]].from_dict(saved)
    if model is not None:
        _check_same_model(config, load_config(where, **options), model)
    return config, GenerationConfig.from_dict(json.loads(source["generation_config"]))


def _where(source: dict[str, Any] | None, path: str, model: str | None) -> str:
    """Folder or hub name to load the tokenizer from."""
    if model is not None:
        return str(Path(model).expanduser()) if model.startswith("~") else model
    if source is None:
        raise ValueError(
            f"checkpoint {path!r} does not say which model it started from: name it with --model"
        )
    folder = source["folder"]
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(
            f"the run started from {folder!r}, which is not there: say with --model where it is now"
        )
    return folder or source["model"]


def _configs_of(model: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    from transformers import GenerationConfig

    config = load_config(model, **options)
    try:
        return config, GenerationConfig.from_pretrained(checked_path(model), **options)
    except OSError:  # not every model has one
        return config, None


def _check_same_model(config: Any, other: Any, model: str) -> None:
    """Raise ValueError where the tokenizer would belong to another model."""
    ours, theirs = config.get_text_config(), other.get_text_config()
    for name in ("model_type", "vocab_size"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ValueError(
                f"--model {model!r} is not what the run started from: its {name} is "
                f"{getattr(theirs, name)}, the checkpoint's is {getattr(ours, name)}"
            )


def _shown(weights: dict[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, with a progress bar in a terminal."""
    names = track(
        layout.shapes,
        "export",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    for name in names:
        yield name, weights[name]
