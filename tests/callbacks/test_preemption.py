"""SIGTERM ends a run with a checkpoint and exit code 143; nothing of it is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.faults.fault_run import begin, children, is_gone
from tests.warm import Warm

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def straight(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    code, output = begin(warm, folder).finish(120)
    assert code == 0, output
    return folder


def assert_same_end(folder: Path, straight: Path) -> None:
    found, expected = (torch.load(f / "end.pt", weights_only=True) for f in (folder, straight))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)


def test_one_process_stops_in_the_middle_of_a_batch_and_goes_on_as_if_it_never_had(
    warm: Warm, tmp_path: Path, straight: Path
) -> None:
    run = begin(warm, tmp_path, "--pause=20")
    run.wait_for("batch 0")
    time.sleep(1.5)  # to its pause before the backward pass
    os.kill(run.pid, signal.SIGTERM)
    start = time.monotonic()
    code, output = run.finish()
    assert code == 143, output
    assert time.monotonic() - start < 15  # not the batch's pauses
    assert "exit code 143; without a checkpoint, since no step has been made yet" in output
    run = begin(warm, tmp_path, "--pause=0.3")
    run.wait_for("batch 4")
    for _ in range(2):  # as where a launcher and a cluster both send it
        os.kill(run.pid, signal.SIGTERM)
        time.sleep(0.02)
    code, output = run.finish()
    assert code in (143, -signal.SIGTERM), output  # both are 143 to a shell
    code, output = begin(warm, tmp_path).finish(120)
    assert code == 0, output
    assert "batch 3" not in output  # was saved
    assert_same_end(tmp_path, straight)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sketch_ddp", "sketch_fsdp"])
def test_processes_agree_on_a_signal_that_one_of_them_got(
    warm: Warm, tmp_path: Path, strategy: str
) -> None:
    options = [f"--strategy={strategy}", "--devices=2"]
    run = begin(warm, tmp_path / "a", *options, "--pause=0.2")
    run.wait_for("batch 2")
    (child,) = children(run.pid)
    os.kill(child, signal.SIGTERM)
    code, output = run.finish()
    assert code == 143, output
    for name in "ab":
        code, output = begin(warm, tmp_path / name, *options).finish(120)
        assert code == 0, output
    assert_same_end(tmp_path / "a", tmp_path / "b")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_process_that_dies_takes_the_other_with_it(
    warm: Warm, tmp_path: Path, victim: str
) -> None:
    run = begin(warm, tmp_path, "--strategy=sketch_ddp", "--devices=2", "--pause=0.5")
    run.wait_for("batch 1")
    (child,) = children(run.pid)
    os.kill(run.pid if victim == "first" else child, signal.SIGKILL)
    assert is_gone(child, 30)
    code, output = run.finish(30)
    assert code != 0, output
    assert (tmp_path / "saved" / "last.ckpt").exists()
