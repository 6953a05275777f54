"""The check for GPUs: what it does with checks that fail, crash or never end, on a CPU."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from logra_lightning.sketch.projection import projection_key, rademacher
from tests.conftest import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_check")


def report_of(gpu_check: Any, name: str) -> Any:
    """What a check of tiny sizes finds in this process."""
    check = gpu_check.BY_NAME[name]
    function = getattr(importlib.import_module(f"gpu_checks.{check.file}"), name)
    report = gpu_check.Report(CPU, True, lambda _: None)
    function(report)
    return report


def test_projections_and_halves_are_the_same_on_the_same_device(gpu_check: Any) -> None:
    report = report_of(gpu_check, "projection")
    assert report.reasons == []
    signs = rademacher(projection_key(0, 3, "layers.0.rademacher"), 5, 130, device=CPU)
    expected = hashlib.sha256(signs.numpy().tobytes()).hexdigest()[:16]
    assert report.figures["rademacher 5x130"] == expected


def test_other_bits_on_a_device_are_found(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = importlib.import_module("gpu_checks.bits")
    calls: list[int] = []

    def rounds_differently(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(0)
        weight, residual = split(master)
        residual[3] += len(calls) - 1  # the second call stands for the device
        return weight, residual

    split = bits.split
    monkeypatch.setattr(bits, "split", rounds_differently)
    (first, second) = report_of(gpu_check, "projection").reasons
    assert first.startswith("split's residual: ")
    assert second == "join after split: 1 of 4032 bytes differ"


def test_the_second_process_must_merge_the_same_bits(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = importlib.import_module("gpu_checks.bits")
    asked: list[str] = []

    def run_apart(check: Any, quick: bool, limit_s: float) -> Any:
        asked.append(check.name)
        good = bits.merge_digests(bits.updates(quick, CPU))
        bad = dict(good, **{next(iter(good)): "0" * 16})
        return gpu_check.record(check.name, "pass", 1, {"as it comes": good, "tf32": bad})

    monkeypatch.setattr(gpu_check, "run_apart", run_apart)
    report = report_of(gpu_check, "merge")
    assert asked == ["merge_bits"]
    assert report.reasons == ["other bits in a second process, tf32"]
    assert set(report.figures["equal to the CPU's"].values()) == {1.0}


def test_a_merge_that_is_wrong_or_depends_on_the_cut_is_found(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = importlib.import_module("gpu_checks.bits")

    def cut_dependent(weight: Any, direction: Any, entries: Any, **options: Any) -> None:
        weight.add_(weight.shape[0])  # rows of the block, not of the whole

    monkeypatch.setattr(bits, "merge_", cut_dependent)
    update = bits.Update((5, 7), 4, torch.float32, CPU)
    whole = update.merged()
    assert (whole.double() - update.exact()).abs().max() > 1
    report = gpu_check.Report(CPU, True, lambda _: None)
    bits.check_cuts(report, "5x7", update, whole, [3])
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("5x7 cut into rows at [0, 3, 5]: ")


def test_sketches_are_compared_with_a_dense_gradient(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = importlib.import_module("gpu_checks.models")
    monkeypatch.setattr(models, "PRECISIONS", ("32-true",))
    report = report_of(gpu_check, "capture")
    assert report.reasons == []
    assert set(report.figures) == {"32-true", "32-true checkpointed"}
    once = models.SketchCapture
    monkeypatch.setattr(models, "SketchCapture", lambda sketches: [once(sketches), once(sketches)])
    report = report_of(gpu_check, "capture")
    assert list(report.figures.values()) == pytest.approx([1.0, 1.0], rel=1e-4)  # 2 S against S
    assert [reason.split(":")[0] for reason in report.reasons] == list(report.figures)


# Checks that fail, crash or never end.


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_check: Any, text: str) -> Any:
    """A check in a file of its own."""
    (tmp_path / "stub_checks").mkdir()
    (tmp_path / "stub_checks" / "stub.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("stub_checks.stub")
    monkeypatch.setitem(sys.modules, "gpu_checks.stub", module)
    sys.modules.pop("stub_checks.stub")
    sys.modules.pop("stub_checks")
    return gpu_check.Check("broken", "stub", ("torch",), 30)


def test_a_part_that_raises_does_not_hide_the_next(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "def broken(report):\n"
        "    with report.part('one'):\n        raise KeyError('gone')\n"
        "    with report.part('two'):\n        report.figures['two'] = 2\n"
        "    report.need(False, 'three is not four')\n"
        "    1 / 0\n"
    )
    check = stub(tmp_path, monkeypatch, gpu_check, text)
    told: list[Any] = []
    found = gpu_check.run_here(check, True, told.append)
    assert found["outcome"] == "fail"
    assert found["figures"] == {"two": 2}
    assert found["reason"] == (
        "one: KeyError: 'gone' [stub.py:3]; three is not four; "
        "whole: ZeroDivisionError: division by zero [stub.py:7]"
    )
    assert [t["reason"] for t in told] == ["import", "whole", "one", "two"]


def test_what_cannot_run_here_is_skipped_with_its_reason(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = gpu_check.Check("x", "x", ("torch", "no_such_package"), 1)
    found = gpu_check.run_here(missing, True, print)
    assert (found["outcome"], found["reason"]) == ("skip", "needs no_such_package")
    found = gpu_check.run_here(gpu_check.BY_NAME["merge"], False, print)
    assert found["reason"] == "torch finds no CUDA device; --quick needs none"
    found = gpu_check.run_here(gpu_check.BY_NAME["peaks_7b"], True, print)
    assert found["reason"] == "torch finds no CUDA device"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys, time, json\n{code}"]


RUNNING = (
    "print(json.dumps({'name': 'x', 'outcome': 'running', 'seconds': 0, 'figures': {'a': 1}, "
    "'reason': 'part b'}), flush=True)\n"
)


def test_a_check_that_never_ends_is_killed_and_keeps_its_figures(gpu_check: Any) -> None:
    check = gpu_check.Check("x", "x", (), 1)
    found = gpu_check.run_apart(check, True, 0.4, python(f"{RUNNING}time.sleep(60)"))
    assert found["outcome"] == "timeout"
    assert found["figures"] == {"a": 1}
    assert found["reason"] == "not done after 0 s in part 'part b'"
    assert found["seconds"] < 10


def test_a_check_that_crashes_tells_its_last_line(gpu_check: Any) -> None:
    check = gpu_check.Check("x", "x", (), 1)
    code = f"{RUNNING}print('CUDA error: 700', file=sys.stderr)\nsys.exit(3)"
    found = gpu_check.run_apart(check, True, 20, python(code))
    assert (found["outcome"], found["figures"]) == ("fail", {"a": 1})
    assert found["reason"] == "exit code 3 in part 'part b', which said: CUDA error: 700"
    found = gpu_check.run_apart(check, True, 20, python("sys.exit(3)"))
    assert found["reason"] == "exit code 3, which said: nothing"


def test_the_record_of_an_ended_check_is_taken_whatever_else_it_prints(gpu_check: Any) -> None:
    check = gpu_check.Check("x", "x", (), 1)
    done = gpu_check.record("x", "pass", 5, {"a": 2})
    code = f"{RUNNING}print('INFO')\nprint('''{json.dumps(done)}''')\nprint('{{}}')"
    found = gpu_check.run_apart(check, True, 20, python(code))
    assert found["seconds"] != 5
    assert found | {"seconds": 5.0} == done


@pytest.mark.parametrize(("outcome", "code"), [("skip", 0), ("fail", 1), ("timeout", 1)])
def test_the_table_the_file_and_the_exit_code(
    gpu_check: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    outcome: str,
    code: int,
) -> None:
    def run_apart(check: Any, quick: bool, limit_s: float) -> Any:
        assert limit_s <= check.limit_s
        if check.name == "kl":
            return gpu_check.record("kl", outcome, 3.4, {}, "a | b\nc" + "d" * 200)
        return gpu_check.record(check.name, "pass", 1.2, {"x": {"y": 0.12345}, "list": [1]})

    path = tmp_path / "x.json"
    monkeypatch.setattr(gpu_check, "run_apart", run_apart)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--json", str(path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    if code:
        with pytest.raises(SystemExit) as stop:
            gpu_check.main()
        assert stop.value.code == code
    else:
        gpu_check.main()
    lines = capsys.readouterr().out.splitlines()
    names = [check.name for check in gpu_check.CHECKS]
    assert [json.loads(line)["name"] for line in lines[: len(names)]] == names
    assert [found["name"] for found in json.loads(path.read_text())] == names
    rows = lines[len(names) + 2 :]
    assert rows[0] == "| projection | pass | 1 | x: y 0.123 |"
    assert rows[3].startswith(f"| kl | {outcome} | 3 | a / b cddd")
    assert rows[3].endswith("ddd... |")
    assert {row.count("|") for row in rows} == {5}


def test_checks_that_would_begin_too_late_are_skipped(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def run_apart(check: Any, quick: bool, limit_s: float) -> Any:
        now[0] += 50
        return gpu_check.record(check.name, "pass", limit_s)

    monkeypatch.setattr(gpu_check, "run_apart", run_apart)
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: now[0])
    checks = [gpu_check.Check(name, "x", (), 60) for name in "abcd"]
    found = list(gpu_check.run_all(checks, False, 2))
    assert [(f["name"], f["outcome"], f["seconds"]) for f in found] == [
        ("a", "pass", 60),
        ("b", "pass", 60),
        ("c", "pass", 20),
        ("d", "skip", 0),
    ]
    assert found[-1]["reason"] == "no time left of 2 minutes"


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*command, "--json", str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = {found["name"]: found for found in json.loads(path.read_text())}
    outcomes = {name: found["outcome"] for name, found in records.items()}
    assert len(outcomes) == 12
    skipped = {name for name, outcome in outcomes.items() if outcome == "skip"}
    assert skipped <= {"peaks_7b", "vllm_float32", "vllm_bfloat16", "vllm_sleep"}
    assert records["quickstart"]["figures"]["32-true"]["resumed"] == "equal"
    assert len(records["merge"]["figures"]["digests"]) == 4
