"""Names of options and classes that were others before, for messages that say the new one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_OBJECTIVE = (
    "advantage",
    "loss",
    "normalizer",
    "correction",
    "reference_kl",
    "entropy_coefficient",
    "mask_truncated",
)
_MEMORY = ("activation_checkpointing", "max_tokens_per_microbatch", "logprob_chunk_tokens")

OPTIONS = {
    **{f"model.{name}": f"model.objective.{name}" for name in _OBJECTIVE},
    **{f"model.{name}": f"model.memory.{name}" for name in _MEMORY},
    "model.eval_sampling": "model.evaluation.sampling",
    "model.eval_completions": "model.evaluation.completions",
    "model.eval_pass_k": "model.evaluation.pass_k",
    "model.success_reward": "model.evaluation.success_reward",
}
"""Old path of an option to its new one."""

CLASSES = {
    **{f"rollout.{name}": f"engines.{name}" for name in ("TorchEngine", "VLLMEngine")},
    **{
        f"sketch.{name}": f"optim.{name}" for name in ("AdamWOptions", "RelativeRowAdam", "RowAdam")
    },
    "sketch.KLProbe": "kl.KLProbe",
}
"""Old class path to its new one, both without `logra_lightning.`."""

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_CLASS = re.compile(
    r"(?:logra_lightning\.)?("
    + "|".join(map(re.escape, sorted(CLASSES, key=len, reverse=True)))
    + r")"
)


def renamed_in(arguments: Sequence[str]) -> str:
    """One line that names the first old path among the arguments or in files that they name.

    Args:
        arguments: words of the command line, such as `["fit", "--config", "my.yaml"]`.

    Returns:
        The message, empty where nothing was renamed.
    """
    for place, name, value in _settings(arguments):
        if new := _new_option(name):
            return f"{place}{name} is {new} now: write it there"
        found = _CLASS.fullmatch(value) if isinstance(value, str) else None
        if found:
            old, new = (f"logra_lightning.{path}" for path in (found[1], CLASSES[found[1]]))
            return f"{place}{name}: {old} is {new} now: write that path"
    return ""


def _new_option(name: str) -> str:
    """The new name of an option or of one within it, empty where it is not an old one."""
    parts = name.removesuffix("+").split(".")
    within: list[str] = []
    if parts[0] in _SUBCOMMANDS:  # in a file for all of them, as `logra_lightning -c FILE fit`
        within = [parts.pop(0)]
    for count in range(len(parts), 1, -1):
        new = OPTIONS.get(".".join(parts[:count]))
        if new:
            return ".".join([*within, new, *parts[count:]])
    return ""


def _settings(arguments: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Where it was written, dotted name and value of all that the arguments set."""
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = "--config" if flag == "-c" else flag
        if not flag.startswith("--"):
            continue
        name = flag[2:]
        if not equals:
            value = rest[0] if rest and not rest[0].startswith("--") else ""
        yield "--", name, value
        if value and Path(value).suffix in (".yaml", ".yml", ".json"):
            prefix = "" if name == "config" else name
            for key, inner in _flat(_read(Path(value)), prefix):
                yield f"{value}: ", key, inner


def _read(path: Path) -> Any:
    """What a file of settings holds; nothing where it cannot be read, which the parser tells."""
    try:
        return yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Dotted names of a nested mapping, with what they hold; items of lists share a name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat_item(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, name)
    else:
        yield name, value


def _flat_item(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, None
    yield from _flat(value, name)
