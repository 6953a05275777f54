"""Writes Hugging Face folders, which are either whole or not there at all.

A folder has weights, config, tokenizer and generation config. Weights come one at a time and are
written in shards, so that no more than one shard is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from logra_lightning.names import named

DType = Literal["auto", "float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SHARD_BYTES = 5_000_000_000


class Layout:
    """Which weights a causal language model has, and under which names `transformers` stores them.

    Args:
        config: the config of a `transformers` model; it is not changed.

    Attributes:
        architecture: name of the model's class.
        config: copy of the config; of a model with other parts, that of the language model alone.
        generation_config: the default generation config of the model.
        shapes: shape of each weight, by its name in the model; of tied weights only one is listed.
        ties: name of each tied weight that is not listed in `shapes`, with the name of the one that
            is: `{"lm_head.weight": "model.embed_tokens.weight"}`.
        files: shape of each weight, by its name in the files; for some models these names differ
            from the ones in the model.

    Raises:
        ValueError: this is not the config of a causal language model, or its weights cannot be
            stored one at a time.
    """

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        kind = type(config).__name__
        if type(config).__module__.startswith("transformers_modules"):
            raise ValueError(f"{kind} comes with code of its own, which an export leaves behind")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"{kind} has a quantization_config, so its weights are not those that train: start "
                f"from a model that is not quantized"
            )
        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(config)
        self.architecture = type(self._model).__name__
        self.config = self._model.config
        self.generation_config = self._model.generation_config
        weights = self._model.state_dict()
        self.ties: dict[str, str] = dict(self._model.all_tied_weights_keys)
        left_out = self.ties.keys() | set(self._model._keys_to_ignore_on_save or ())
        weights = {name: weight for name, weight in weights.items() if name not in left_out}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.files = _shapes(self.stored(weights))
        one_by_one = [self.stored({name: weight}) for name, weight in weights.items()]
        if self.files != _shapes({n: w for stored in one_by_one for n, w in stored.items()}):
            raise ValueError(
                f"transformers stores several weights of a {self.architecture} as one, "
                f"which an export cannot: use the policy's own save_pretrained"
            )

    def stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights under the names, and in the form, that files have: for most models the same."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, weights)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are the weights of the model, tied ones once or twice."""
        found = {n: shape for n, shape in _shapes(weights).items() if n not in self.ties}
        _check_same(found, self.shapes, f"the weights are not those of a {self.architecture}")

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Weights to write beside the policy's, with their names in the files; here none."""
        return iter(())

    def copy_files(self, folder: Path) -> None:
        """Add the files that belong to the others and hold no weights; here none."""

    def expected(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shape of each weight that files have to hold, by its name there.

        Args:
            config: the config that was written beside them.
        """
        return Layout(config).files


@dataclass(frozen=True)
class Written:
    """What `write_folder` wrote.

    Args:
        folder: absolute path of the folder.
        nbytes: size of all weights, in bytes.
        dtype: dtype of the weights as the config names it, for instance `bfloat16`.
    """

    folder: Path
    nbytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.folder} ({self.nbytes:,} bytes of weights, {self.dtype})"


def check_dtype(dtype: str) -> None:
    """Raise ValueError unless weights can be written in this dtype."""
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DType))}, got {dtype!r}")


def check_output_dir(output_dir: str | Path) -> Path:
    """Return the absolute path of a folder, having checked that it can be written.

    Raises:
        ValueError: the folder exists and is not empty, or it cannot be written.
    """
    folder = Path(output_dir).expanduser().resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"there is something in output_dir {str(folder)!r}: name a new folder")
        if os.path.ismount(folder):  # a finished folder could not be renamed to it
            raise ValueError(
                f"output_dir {str(folder)!r} is where a disk is mounted: name a folder in it"
            )
        draft = _draft(folder)
        if draft.exists():  # left by an export that was killed
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        draft.rmdir()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"output_dir {str(folder)!r} cannot be written: {reason}") from error
    return folder


def write_folder(
    output_dir: str | Path,
    layout: Layout,
    weights: Iterable[tuple[str, Tensor]],
    *,
    tokenizer: Any,
    generation_config: Any,
    dtype: DType = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Write a folder that `transformers` (`from_pretrained`) and vLLM can open.

    Everything is written to a hidden folder beside it, which is renamed once it has been checked.
    So a process that is killed never leaves half a folder under the final name. What it does leave
    is removed by the next call.

    Args:
        output_dir: folder to write; it must not exist yet, or must be empty.
        layout: names and shapes of the model's weights.
        weights: name and tensor (CPU) of every weight in `layout.shapes`; taken one at a time.
        tokenizer: the model's tokenizer, with its chat template.
        generation_config: the model's generation config.
        dtype: dtype of the written weights; `auto` keeps that of each weight.
        max_shard_bytes: largest size of a file, and so of what is in memory at the same time. A
            weight that is larger gets a file of its own.

    Returns:
        The folder, its size and its dtype.

    Raises:
        ValueError: the dtype is unknown, or `output_dir` cannot be written or is not empty.
        OSError: the disk is full, or the like; nothing is left behind.
        RuntimeError: the written files are not those that `transformers` will look for.
    """
    check_dtype(dtype)
    folder = check_output_dir(output_dir)
    draft = _draft(folder)
    draft.mkdir()
    try:
        tokenizer.save_pretrained(draft)
        # Not by its save_pretrained, which refuses values that some models on the hub have.
        generation_config.to_json_file(draft / "generation_config.json", use_diff=True)
        shards = _Shards(draft, max_shard_bytes)
        for name, weight in weights:
            for stored_name, stored in layout.stored({name: _cast(weight, dtype)}).items():
                shards.add(stored_name, stored)
            del weight, stored
        for name, weight in layout.others():
            shards.add(name, _cast(weight, dtype))
        shards.close()
        # Of several dtypes the widest: no value changes when weights are read into it.
        found = reduce(torch.promote_types, shards.dtypes)
        layout.config.dtype = found
        layout.config.architectures = [layout.architecture]
        layout.config.save_pretrained(draft)
        layout.copy_files(draft)
        _check_written(draft, layout)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        raise OSError(
            f"{folder} could not be written: {error}; {free / 1e6:,.1f} MB are free there"
        ) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Written(folder, shards.nbytes, str(found).removeprefix("torch."))


class _Shards:
    """Safetensors files of limited size, named as `transformers` looks for them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.dtypes: set[torch.dtype] = set()
        self._held: dict[str, Tensor] = {}
        self._written: list[list[str]] = []

    def add(self, name: str, weight: Tensor) -> None:
        held = sum(other.nbytes for other in self._held.values())
        if self._held and held + weight.nbytes > self.max_bytes:
            self._write()
        self._held[name] = weight.contiguous()
        self.nbytes += weight.nbytes
        if weight.is_floating_point():
            self.dtypes.add(weight.dtype)

    def close(self) -> None:
        """Write the last shard, and name all files now that their number is known."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self.folder / "model.safetensors")
            return
        files: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self.folder / file)
            files |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": files}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _write(self) -> None:
        save_file(self._held, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._held = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number}.safetensors"


def _draft(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _cast(weight: Tensor, dtype: DType) -> Tensor:
    if dtype == "auto" or not weight.is_floating_point():
        return weight
    return weight.to(_DTYPES[dtype])


def _check_written(folder: Path, layout: Layout) -> None:
    """Compare names and shapes in the written files with those that the written config needs."""
    from transformers import AutoConfig

    found: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = layout.expected(AutoConfig.from_pretrained(folder))
    _check_same(found, expected, "the files are not what their config asks for", RuntimeError)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _check_same(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    what: str,
    error: Callable[[str], Exception] = ValueError,
) -> None:
    parts = []
    if missing := expected.keys() - found.keys():
        parts.append(f"missing {named(sorted(missing))}")
    if unexpected := found.keys() - expected.keys():
        parts.append(f"unexpected {named(sorted(unexpected))}")
    for name in expected.keys() & found.keys():
        if found[name] != expected[name]:
            parts.append(f"{name!r} has shape {list(found[name])}, not {list(expected[name])}")
    if parts:
        raise error(f"{what}: {'; '.join(parts[:3])}")
