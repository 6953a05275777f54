"""Exports the parts of a checkpoint that are not the policy, such as a vision tower, unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from logra_lightning.hub import checked_path, hub_options, one_line_errors
from logra_lightning.names import named
from logra_lightning.policy.hf_folder import Layout
from logra_lightning.policy.load import load_config

_PART = "language_model."  # stands in the names of its weights, before or after `model.`
_OTHER_FILES = ("*processor*.json",)  # what reads images and videos


def layout_of(config: Any, source: str, options: Mapping[str, Any]) -> Layout:
    """The layout of an export: of the policy alone, or of the whole checkpoint it was a part of.

    Args:
        config: the policy's config.
        source: folder or hub name that the policy was loaded from; empty where it was not loaded.
        options: those of `from_pretrained` that it was loaded with.

    Raises:
        ValueError: the source cannot be read, or its other parts cannot be kept.
    """
    if not source:
        return Layout(config)
    whole = load_config(source, **hub_options(options))
    if whole.model_type == config.model_type or whole.get_text_config() is whole:
        return Layout(config)
    return WholeLayout(config, whole, _folder_of(source, options))


class WholeLayout(Layout):
    """Which weights a checkpoint has, of which the policy is the language model.

    Args:
        config: the policy's config; it is not changed.
        whole: the config of the whole checkpoint; it is not changed either.
        folder: the checkpoint.

    Attributes:
        files: shape of each weight of the whole checkpoint, by its name in the files.

    The others are those of `Layout`: `shapes` and `ties` are the policy's, `config` and
    `architecture` the whole checkpoint's.

    Raises:
        ValueError: the checkpoint is not in safetensors files, or does not have all of the policy.
    """

    def __init__(self, config: Any, whole: Any, folder: Path) -> None:
        super().__init__(config)
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    self._file_of[name] = path
                    sizes[name] = tuple(file.get_slice(name).get_shape())
        own = self.files  # of the policy alone
        there = {name.replace(_PART, "", 1): name for name in sizes}
        names = {n: there.get(n, n if n.startswith("lm_head.") else "") for n in own}
        if missing := [name for name, found in names.items() if not found]:
            raise ValueError(
                f"the model in {str(folder)!r} has more parts than the policy, and they cannot be "
                f"kept: its safetensors files have no weight for the policy's {named(missing)}"
            )
        self._names = names
        self._others = [
            name
            for short, name in there.items()
            if short not in names and short not in self.ties  # a tied head is the embedding
        ]
        self.files = {names[n]: shape for n, shape in own.items()}
        self.files |= {name: sizes[name] for name in self._others}
        text, self.config = self.config, type(whole).from_dict(whole.to_dict())
        self.config.text_config = text
        self.config.tie_word_embeddings = text.tie_word_embeddings
        self.architecture = (whole.architectures or [self.architecture])[0]

    def stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The policy's weights under the names that the whole checkpoint has for them."""
        stored = super().stored(weights)
        names = getattr(self, "_names", {})  # not there yet while the policy alone is looked at
        return {names.get(name, name): weight for name, weight in stored.items()}

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight that is not the policy's, with its name in the files, as it was."""
        for name in self._others:
            with safe_open(self._file_of[name], framework="pt") as file:
                yield name, file.get_tensor(name)

    def copy_files(self, folder: Path) -> None:
        """Copy what belongs to the other parts and holds no weights."""
        for pattern in _OTHER_FILES:
            for path in self._folder.glob(pattern):
                shutil.copyfile(path, folder / path.name)

    def expected(self, config: Any) -> dict[str, tuple[int, ...]]:
        """See `Layout.expected`; what is written is what was read, and the policy."""
        del config
        return self.files


def _folder_of(source: str, options: Mapping[str, Any]) -> Path:
    """The folder of a model; of a hub name, where its files are downloaded to."""
    from huggingface_hub import snapshot_download

    path = Path(checked_path(source))
    if path.is_dir():
        return path / (options.get("subfolder") or "")
    names = ("revision", "cache_dir", "token", "local_files_only", "force_download")
    given = {name: options[name] for name in names if name in options}
    with one_line_errors(source):
        found = snapshot_download(source, allow_patterns=["*.safetensors", *_OTHER_FILES], **given)
    return Path(found) / (options.get("subfolder") or "")
