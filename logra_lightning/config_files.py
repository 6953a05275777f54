"""What YAML files of settings say: where a key stands, and keys that a mapping has twice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Key:
    """A key of a mapping in a file.

    Args:
        file: path of the file, as it was given.
        line: number of the line, from 1.
        path: the key with those that it lies in, such as `model.rewards[0].weight`.
        beside: all keys of its mapping.
    """

    file: str
    line: int
    path: str
    beside: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.path}"


def doubled_key(arguments: Sequence[str]) -> str:
    """Return one line about the first key that a mapping has twice; empty where none has.

    YAML would keep the last of the two values without a word.

    Args:
        arguments: words of the command line, such as `["fit", "--config", "my.yaml"]`.
    """
    for file in _files(arguments):
        first: dict[tuple[int, str], Key] = {}
        for mapping, key in _keys(file):
            before = first.setdefault((mapping, key.path), key)
            if before is not key:
                return f"{key} stands there twice, first in line {before.line}: remove one of them"
    return ""


def places_of(arguments: Sequence[str], name: str, valid: Collection[str] = ()) -> list[Key]:
    """Return where the files have a key.

    Args:
        arguments: words of the command line.
        name: the key, as its full path or as its last part.
        valid: keys that may stand beside it; where some places have no others, only these count.
    """
    keys = [key for file in _files(arguments) for _, key in _keys(file)]
    last = name.rpartition(".")[2]
    # In a file that another one names, the path is shorter.
    found = [key for key in keys if key.path == name] or [
        key for key in keys if key.path.rpartition(".")[2] == last
    ]
    fitting = [key for key in found if set(key.beside) <= {last, *valid}]
    return fitting or found


def _files(arguments: Sequence[str]) -> Iterator[str]:
    """The files that arguments name, as `--config my.yaml`, and those that such files name."""
    seen = set()
    rest = [word.partition("=")[2] if word.startswith("-") else word for word in arguments]
    while rest:
        file = rest.pop(0)
        if file in seen or Path(file).suffix not in _SUFFIXES:
            continue
        seen.add(file)
        if Path(file).expanduser().is_file():
            yield file
            folder = Path(file).parent
            named = [n.value for n in _nodes(_composed(file), set()) if isinstance(n, ScalarNode)]
            rest += [str(folder / name) if (folder / name).is_file() else name for name in named]


def _composed(file: str) -> Node | None:
    """What a file holds; nothing of one that YAML cannot read, which the parser tells."""
    try:
        return yaml.compose(Path(file).expanduser().read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _nodes(node: Node | None, seen: set[int]) -> Iterator[Node]:
    """A node and all below it, each once, also where several places refer to it."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    yield node
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _nodes(item, seen)
    elif isinstance(node, MappingNode):
        for _, value in node.value:
            yield from _nodes(value, seen)


def _keys(file: str) -> Iterator[tuple[int, Key]]:
    """All keys of a file, each with a number of its mapping."""
    root = _composed(file)
    paths = {id(root): ""}
    for node in _nodes(root, set()):
        path = paths[id(node)]
        if isinstance(node, SequenceNode):
            for number, item in enumerate(node.value):
                paths.setdefault(id(item), f"{path}[{number}]")
        elif isinstance(node, MappingNode):
            beside = tuple(str(key.value) for key, _ in node.value)
            for key, value in node.value:
                full = f"{path}.{key.value}" if path else str(key.value)
                paths.setdefault(id(value), full)
                if key.tag != "tag:yaml.org,2002:merge":
                    yield id(node), Key(file, key.start_mark.line + 1, full, beside)
