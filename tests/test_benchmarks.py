"""Benchmarks run, print one table and write the same figures as JSON."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from logra_lightning.policy.load import load_policy
from logra_lightning.sketch import find_targets
from tests.conftest import ROOT, TINY_POLICY


def run(name: str, path: Path) -> tuple[str, dict[str, list[Any]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, json.loads(path.read_text())


@pytest.mark.slow
def test_rollout_throughput(tmp_path: Path) -> None:
    table, figures = run("rollout_throughput.py", tmp_path / "x.json")
    assert set(figures) == {"TorchEngine", "transformers.generate"}
    for name, values in figures.items():
        assert f"| {name} | {values[0]:.0f} |" in table


@pytest.mark.vllm
@pytest.mark.slow
def test_weight_sync(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    tables, figures = run("weight_sync.py", tmp_path / "x.json")
    policy = load_policy(str(TINY_POLICY))
    rows = sum(module.out_features for module in find_targets(policy).values())
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    sent = {(row["dtype"], row["mode"]): row["bytes"] for row in figures["sync"]}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert sent.pop((dtype, "factors")) == rows * 64 * 2
        assert sent.pop((dtype, "shared")) == 0
        assert sent.pop((dtype, "dense")) == sent.pop((dtype, "vLLM reload_weights"))
        assert f"| {dtype} | dense | {numbers * size:,} | 1.000 |" in tables
    assert len(figures["generate"]) == 6
    first, second = tables.split("\n\n")
    assert [len(table.splitlines()) for table in (first, second)] == [12, 9]
    assert {line.count("|") for line in first.splitlines()} == {7}


@pytest.mark.slow
def test_sketch_vs_dense(tmp_path: Path) -> None:
    table, figures = run("sketch_vs_dense.py", tmp_path / "x.json")
    for kind, results in figures.items():
        assert results[0]["after"] > 0.9
        assert f"| {kind} | {results[0]['before']:.3f} | {results[0]['after']:.3f} |" in table


@pytest.mark.vllm
@pytest.mark.slow
def test_kl_probe(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    table, figures = run("kl_probe.py", tmp_path / "x.json")
    result: Any = figures["quickstart"]
    assert result["steps"] == 20
    assert 0.7 <= result["ratio"] <= 1.4
    assert result["over"] <= 2.0
    assert f"| quickstart | 20 | {result['ratio']:.2f} | {result['over']:.2f} |" in table


def test_smollm2_vs_dense_reads_whole_runs_alone(tmp_path: Path) -> None:
    """What it trains takes an hour; here is how it reads what was trained."""
    read = runpy.run_path(str(ROOT / "benchmarks" / "smollm2_vs_dense.py"))["read"]
    with SummaryWriter(str(tmp_path / "version_0")) as writer:
        for step in (1, 2, 3):
            writer.add_scalar("rollout/reward", step / 10, step)
        for step, success in ((0, 0.0), (3, 0.875)):
            writer.add_scalar("eval/pass@1", success, step)
    values = read(tmp_path, 3)
    assert values["rollout/reward"] == pytest.approx([0.1, 0.2, 0.3])
    assert values["eval/pass@1"] == [0.0, 0.875]
    with pytest.raises(SystemExit, match="did not make 4 steps: remove it"):
        read(tmp_path, 4)


@pytest.mark.faults
@pytest.mark.slow
def test_kill_resume(tmp_path: Path) -> None:
    table, figures = run("kill_resume.py", tmp_path / "x.json")
    assert sum(row["kills"] for row in figures.values()) == 8
    assert "8 kills in" in table
    assert "0 lost, 0 mismatches" in table


@pytest.mark.slow
def test_fsdp_start(tmp_path: Path) -> None:
    table, rows = run("fsdp_start.py", tmp_path / "x.json")
    assert [row[:2] for row in rows] == [  # type: ignore[misc]
        [way, process] for way in ("reads once", "all read") for process in (0, 1)
    ]
    assert len(table.splitlines()) == 6
