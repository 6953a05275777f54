"""Benchmarks run, print one table and write the same figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def run(name: str, path: Path) -> tuple[str, dict[str, list[float]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, json.loads(path.read_text())


def test_rollout_throughput(tmp_path: Path) -> None:
    table, figures = run("rollout_throughput.py", tmp_path / "x.json")
    assert set(figures) == {"TorchEngine", "transformers.generate"}
    for name, values in figures.items():
        assert f"| {name} | {values[0]:.0f} |" in table


@pytest.mark.slow
def test_sketch_vs_dense(tmp_path: Path) -> None:
    table, figures = run("sketch_vs_dense.py", tmp_path / "x.json")
    for kind, results in figures.items():
        assert results[0]["after"] > 0.9
        assert f"| {kind} | {results[0]['before']:.3f} | {results[0]['after']:.3f} |" in table
