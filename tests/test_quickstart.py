"""What the README promises of the quick start: what it learns, prints, writes and logs."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from logra_lightning.cli import main
from tests.conftest import ROOT

# What `make quickstart` runs, and on a machine without vLLM the next best.
TORCH_ENGINE = "--model.engine=logra_lightning.engines.TorchEngine"
SMALL = "--data.init_args.val_size=128"  # a quarter of the held-out prompts
HAS_VLLM = importlib.util.find_spec("vllm") is not None
ENGINE = [] if HAS_VLLM else [TORCH_ENGINE]


def run(*args: str, cwd: Path = ROOT, timeout: int = 240) -> str:
    """Standard output of a command that must succeed."""
    # One thread: with two, anything else that runs on the machine slows a small model tenfold.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        args, cwd=cwd, timeout=timeout, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train(runs: Path, *options: str) -> str:
    """The output of the quick start with validation at both ends."""
    where = f"--trainer.logger.init_args.save_dir={runs}"
    command = [
        sys.executable,
        "-m",
        "logra_lightning",
        "fit",
        "--config",
        "configs/quickstart.yaml",
    ]
    return run(*command, where, *options, *ENGINE)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of the first 15 of its 60 steps."""
    runs = tmp_path_factory.mktemp("runs")
    return runs, train(runs, "--trainer.max_steps=15", SMALL)


def check_success(output: str, steps: int) -> None:
    success = re.search(rf"eval/pass@1: (\S+) at step 0, (\S+) at step {steps}\n", output)
    assert success
    before, after = map(float, success.groups())
    assert 0.4 < before < 0.6
    assert after >= 0.9


def test_a_quarter_of_the_quick_start_goes_from_half_to_nine_tenths(
    quickstart: tuple[Path, str],
) -> None:
    check_success(quickstart[1], 15)


@pytest.mark.slow
def test_the_whole_quick_start_goes_from_half_to_nine_tenths(tmp_path: Path) -> None:
    check_success(train(tmp_path), 60)


def test_last_lines_say_where_everything_lies(quickstart: tuple[Path, str]) -> None:
    last = quickstart[1].strip().splitlines()[-6:]
    patterns = [
        r"eval/pass@1: 0\.\d+ at step 0, [01]\.\d+ at step 15",
        r"seconds per step: \d+\.\d\d \(median of 15\)",
        r"engine: VLLMEngine, weight sync factors: 524,288 bytes per step, 0.440 of a dense sync"
        if HAS_VLLM
        else "engine: TorchEngine",
        r"checkpoint: (.*\.ckpt)",
        r"TensorBoard logs: (.*/quickstart/version_0)",
        r"watch them: tensorboard --logdir (.*/quickstart)",
    ]
    for line, pattern in zip(last, patterns, strict=True):
        found = re.fullmatch(pattern, line.strip())
        assert found, line
        for path in found.groups():  # of files
            assert (ROOT / path).exists()


def test_event_files_hold_every_metric_of_the_docs_and_no_other(
    quickstart: tuple[Path, str],
) -> None:
    tags: set[str] = set()
    for file in (quickstart[0] / "quickstart" / "version_0").glob("events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        tags |= set(events.Tags()["scalars"])
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page.split("## In every run")[1].split("\n## ")[0]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    promised = set(re.findall(r"`([a-z]+/[a-z@_0-9]+)`", rows))
    assert len(promised) > 40
    if not HAS_VLLM:
        promised -= {"sync/bytes", "sync/mode", "time/sync_s"}
    assert tags == promised | {"rewards/exact_match"}


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> str:
    """Standard output of a command of the quick start, in this process, which has all imports."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which the command sets, and which goes again
    monkeypatch.chdir(ROOT)
    command = [args[0], "--config", "configs/quickstart.yaml", TORCH_ENGINE, *args[1:]]
    monkeypatch.setattr(sys, "argv", ["logra_lightning", *command])
    main()
    return capsys.readouterr().out


def test_a_second_fit_makes_a_new_version_and_a_checkpoint_validates(
    quickstart: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs, output = quickstart
    where = f"--trainer.logger.init_args.save_dir={runs}"
    fit = [where, "--trainer.max_steps=1", "--validate_at_ends.enabled=false"]
    run_here(monkeypatch, capsys, "fit", *fit)
    assert (runs / "quickstart" / "version_1" / "checkpoints").is_dir()
    assert list((runs / "quickstart" / "version_0" / "checkpoints").glob("*.ckpt"))
    checkpoint = re.search(r"checkpoint: (.*)", output)
    assert checkpoint
    path = checkpoint.group(1).strip()
    table = run_here(monkeypatch, capsys, "validate", where, SMALL, "--ckpt_path", path)
    after = re.search(r"^eval/pass@1: .* (\S+) at step 15", output, re.MULTILINE)
    shown = re.search(r"eval/pass@1\s*│?\s*([0-9.]+)", table)
    assert after
    assert shown
    assert float(shown.group(1)) == pytest.approx(float(after.group(1)), abs=1e-3)


def test_predict_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--trainer.logger.init_args.save_dir={tmp_path}"
    small = "--data.init_args.val_size=5"
    output = run_here(monkeypatch, capsys, "predict", where, small)
    path = re.search(r"predictions: (.*jsonl)", output)
    assert path
    assert len((ROOT / path.group(1)).read_text().splitlines()) == 5


def check_reward(output: str) -> None:
    reward = re.search(r"reward of the last step: (\S+)", output)
    assert reward
    assert float(reward.group(1)) > 0.8  # it starts at a half


COMPOSED = str(ROOT / "examples" / "compose_callbacks.py")


def test_composed_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which the script sets, and which goes again
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "15")  # a quarter of it
    monkeypatch.setattr(sys, "argv", [COMPOSED, "--engine", "torch"])
    runpy.run_path(COMPOSED, run_name="__main__")
    check_reward(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.vllm
def test_composed_example_learns_with_vllm(tmp_path: Path) -> None:
    check_reward(run(sys.executable, COMPOSED, cwd=tmp_path))
