"""The shape of the code: imports go one way, and every source file has a test of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A part may import those before it, and itself.
ORDER = [
    ("seeding", "types", "names", "tokenizer", "distributed", "checkpoints"),
    ("sketch", "objective", "rewards", "data"),
    ("optim",),
    ("kl",),
    ("policy",),
    ("engines",),
    ("rollout",),
    ("strategy",),
    ("checks",),
    ("lifecycle",),
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
# The second is imported by vLLM alone.
EAGER = {"torch_cache.py": {"transformers"}, "vllm_cpu_worker.py": {"vllm"}}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "callbacks":
        return "callbacks"
    return relative.parts[1].removesuffix(".py")


def imports(node: ast.AST) -> list[str]:
    found = []
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            found += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module:
            found.append(child.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for module in imports(ast.parse(path.read_text())):
        if module.startswith("logra_lightning."):
            other = module.split(".")[1]
            assert other == part or FLOOR[other] < FLOOR[part], f"{part} imports {module}"


def test_the_package_imports_nothing_slow_or_optional_at_the_top() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                roots = {module.split(".")[0] for module in imports(statement)}
                allowed = EAGER.get(path.name, set())
                assert not roots & (LAZY - allowed), path


def test_sketch_and_objective_need_torch_alone() -> None:
    for path in SOURCES:
        if part_of(path) in ("sketch", "objective"):
            for module in imports(ast.parse(path.read_text())):
                assert module.split(".")[0] not in ("lightning", "transformers"), path


def test_every_source_file_has_a_test_file() -> None:
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    # What these do is seen in the runs of test_quickstart and test_configs.
    elsewhere = {"cli", "__init__", "__main__", "engine", "run_summary", "step_progress"}
    elsewhere |= {"vllm_cpu_worker", "vllm_launch"}  # in test_vllm_engine
    elsewhere |= {"pool_process", "pool_worker", "math_grader"}  # in test_pool, test_math_answer
    elsewhere |= {"relative_row_adam", "row_moments", "grad_norm"}  # in test_row_adam
    elsewhere |= {"reference", "lifecycle"}  # in test_module
    elsewhere |= {"single", "tokenizer", "tokenized_prompts"}  # in test_mixin, test_loader
    for path in SOURCES:
        if path.stem not in elsewhere:
            assert f"test_{path.stem}" in tests, path


def test_plain_callbacks_package_refuses_to_be_imported() -> None:
    with pytest.raises(ImportError, match="import logra_lightning.callbacks"):
        __import__("callbacks")


def test_importing_the_package_loads_neither_vllm_nor_datasets() -> None:
    code = "import sys, logra_lightning; print(sorted({'vllm', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
