"""The shape of the code: imports go one way, and every source file has a test of its own."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import logra_lightning
from tests.conftest import ROOT

# A part may import those before it, and itself.
ORDER = [
    ("seeding", "types", "names", "renamed", "config_files", "hub", "distributed", "checkpoints"),
    ("tokenizer",),
    ("sketch", "objective", "rewards", "data"),
    ("optim",),
    ("kl",),
    ("policy",),
    ("engines",),
    ("rollout",),
    ("strategy",),
    ("checks", "monitors", "start_line", "cli_parser"),
    ("module",),
    ("callbacks",),
    ("cli",),
    ("__init__", "__main__"),
]
FLOOR = {part: floor for floor, parts in enumerate(ORDER) for part in parts}
SOURCES = sorted((ROOT / "logra_lightning").rglob("*.py")) + sorted(
    (ROOT / "callbacks").glob("*.py")
)
# Only these may import what is slow or optional, and only inside functions.
LAZY = {"transformers", "datasets", "vllm", "reasoning_gym", "math_verify", "sympy"}
# vLLM alone imports its workers.
EAGER = {
    "torch_cache.py": {"transformers"},
    "vllm_cpu_worker.py": {"vllm"},
    "vllm_gpu_worker.py": {"vllm"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "callbacks":
        return "callbacks"
    return relative.parts[1].removesuffix(".py")


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(node: ast.AST) -> list[str]:
    found = []
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            found += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module == "logra_lightning":
            found += [f"logra_lightning.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module:
            found.append(child.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for module in imports(parsed(path.read_text())):
        if module.startswith("logra_lightning."):
            other = module.split(".")[1]
            assert other == part or FLOOR[other] < FLOOR[part], f"{part} imports {module}"


def test_the_package_imports_nothing_slow_or_optional_at_the_top() -> None:
    for path in SOURCES:
        for statement in parsed(path.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                roots = {module.split(".")[0] for module in imports(statement)}
                allowed = EAGER.get(path.name, set())
                assert not roots & (LAZY - allowed), path


def test_sketch_and_objective_need_torch_alone() -> None:
    for path in SOURCES:
        if part_of(path) in ("sketch", "objective"):
            for module in imports(parsed(path.read_text())):
                assert module.split(".")[0] not in ("lightning", "transformers"), path


def covering(path: Path, tests: Path) -> list[str]:
    """Names of the files in the folder `tests` that test a source file.

    Those of `logra_lightning/kl/budget.py` are `kl/test_budget.py`, and other test files in `kl`
    that import that module or something that is defined in it.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    *folders, stem = parts[1:] if parts[0] == "logra_lightning" else parts
    room = ".".join(["logra_lightning", *folders])
    tree = parsed(path.read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own = {(room, name) for name in names} | {("logra_lightning", name) for name in names}
    found = []
    for file in sorted(tests.joinpath(*folders).glob("test_*.py")):
        imported = {
            (node.module, alias.name)
            for node in ast.walk(parsed(file.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        from_it = (room, stem) in imported or f"{room}.{stem}" in {module for module, _ in imported}
        if file.stem == f"test_{stem}" or from_it or own & imported:
            found.append(file.name)
    return found


def declares_alone(path: Path) -> bool:
    """Whether no function of the file does anything, as in a protocol or in a plain dataclass."""
    functions = [
        node for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
        for function in functions
        for line in function.body
    )


def test_every_source_file_has_a_test_file() -> None:
    apart = ("__init__", "__main__")
    sources = [path for path in SOURCES if path.stem not in apart and not declares_alone(path)]
    assert len(sources) > 100
    without = [path for path in sources if not covering(path, ROOT / "tests")]
    assert [str(path.relative_to(ROOT)) for path in without] == []


def test_a_source_file_without_a_test_file_would_be_found(tmp_path: Path) -> None:
    path = ROOT / "logra_lightning" / "rollout" / "packing.py"  # which defines `pack`
    (tmp_path / "rollout").mkdir()
    test = tmp_path / "rollout" / "test_other.py"
    for line, covers in (
        ("from logra_lightning.rollout.packing import pack", True),
        ("from logra_lightning.rollout import packing", True),
        ("from logra_lightning.rollout import pack", True),
        ("from logra_lightning.rollout import collect", False),
        ("from logra_lightning.rollout.packing_more import pack", False),
    ):
        test.write_text(line)
        assert bool(covering(path, tmp_path)) == covers, line
    test.rename(tmp_path / "test_packing.py")  # outside of its folder
    assert not covering(path, tmp_path)
    (tmp_path / "rollout" / "test_packing.py").touch()
    assert covering(path, tmp_path)


def test_plain_callbacks_package_refuses_to_be_imported() -> None:
    with pytest.raises(ImportError, match="import logra_lightning.callbacks"):
        __import__("callbacks")


def test_the_changelog_has_an_unreleased_section_and_one_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(\S+)\](?: - \d{4}-\d\d-\d\d)?$", changelog, re.MULTILINE)
    assert headings[:2] == ["Unreleased", logra_lightning.__version__]
    assert metadata.version("logra-lightning") == logra_lightning.__version__
