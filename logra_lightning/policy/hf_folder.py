"""Hugging Face folders (weights, config, tokenizer, generation config), whole or not there at all.

Weights come one at a time and go out in shards, of which one is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
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
    """Which weights a causal language model has by its config, and how `transformers` stores them.

    Args:
        config: of a model of `transformers`; it is not changed.

    Attributes:
        config: a copy, without what the language model does not have.
        shapes: of the weights by their names in the model, tied ones once.
        ties: names that are left out, with those that they are tied to.
        files: shapes by the names in files, where some models have others.

    Raises:
        ValueError: it is not the config of such a model, or the files would not be those of it.
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
        self.config = self._model.config
        self.generation_config = self._model.generation_config
        weights = self._model.state_dict()
        self.ties: dict[str, str] = dict(self._model.all_tied_weights_keys)
        left_out = self.ties.keys() | set(self._model._keys_to_ignore_on_save or ())
        weights = {name: weight for name, weight in weights.items() if name not in left_out}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.files = _shapes(self._stored(weights))
        one_by_one = [self.stored(name, weight) for name, weight in weights.items()]
        if self.files != _shapes({n: w for stored in one_by_one for n, w in stored.items()}):
            raise ValueError(
                f"transformers stores several weights of a {type(self._model).__name__} as one, "
                f"which an export cannot: use the policy's own save_pretrained"
            )

    def stored(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """A weight of the model as it lies in files; usually itself."""
        return self._stored({name: weight})

    def _stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, weights)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError where these are not the weights of the model; tied ones may be twice."""
        found = {n: shape for n, shape in _shapes(weights).items() if n not in self.ties}
        _check_same(found, self.shapes, f"the weights are not those of a {self.architecture}")

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self._model).__name__


@dataclass(frozen=True)
class Written:
    """What `write_folder` wrote.

    Args:
        folder: in full.
        nbytes: of the weights.
        dtype: of the weights, as the config has it.
    """

    folder: Path
    nbytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.folder} ({self.nbytes:,} bytes of weights, {self.dtype})"


def check_dtype(dtype: str) -> None:
    """Raise ValueError where it is none that weights can be written in."""
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DType))}, got {dtype!r}")


def check_output_dir(output_dir: str | Path) -> Path:
    """The folder in full, where one can be made.

    Raises:
        ValueError: there is something already, or nothing can be written there.
    """
    folder = Path(output_dir).expanduser().resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"there is something in output_dir {str(folder)!r}: name a new folder")
        if os.path.ismount(folder):  # nothing can take its place
            raise ValueError(
                f"output_dir {str(folder)!r} is where a disk is mounted: name a folder in it"
            )
        draft = _draft(folder)
        if draft.exists():  # of an export that was killed
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
    """Make a folder that `from_pretrained` of `transformers` and vLLM open.

    It is written under a hidden name beside it and renamed when all of it has been checked, so that
    what a killed process leaves is never taken for it; the next call clears that away.

    Args:
        output_dir: must not be there, or be empty.
        layout: of the model.
        weights: all of `layout.shapes`, on the CPU; taken one at a time.
        tokenizer: of the model, with its chat template.
        generation_config: of the model.
        dtype: of the weights; `auto` leaves them as they are.
        max_shard_bytes: of a file, and so of what is in memory. A larger weight has its own file.

    Raises:
        ValueError: an unknown dtype, or `output_dir` cannot be written or is not empty.
        OSError: the disk is full, and the like; nothing is left behind.
        RuntimeError: what was written is not what `transformers` will look for.
    """
    check_dtype(dtype)
    folder = check_output_dir(output_dir)
    draft = _draft(folder)
    draft.mkdir()
    try:
        tokenizer.save_pretrained(draft)
        # Not its save_pretrained, which refuses what some models on the hub have.
        generation_config.to_json_file(draft / "generation_config.json", use_diff=True)
        shards = _Shards(draft, max_shard_bytes)
        for name, weight in weights:
            for stored_name, stored in layout.stored(name, _cast(weight, dtype)).items():
                shards.add(stored_name, stored)
            del weight, stored
        shards.close()
        # Where there are several, the widest: reading into it changes no value.
        found = reduce(torch.promote_types, shards.dtypes)
        layout.config.dtype = found
        layout.config.architectures = [layout.architecture]
        layout.config.save_pretrained(draft)
        _check_written(draft)
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
        """Write the rest; only now is it known how many files there are."""
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


def _check_written(folder: Path) -> None:
    """Read names and shapes back, and compare them with what the written config asks for."""
    from transformers import AutoConfig

    found: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = Layout(AutoConfig.from_pretrained(folder)).files
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
