"""Under torchrun, which starts and ends the processes, nothing is lost either."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.faults.fault_run import children, is_gone
from tests.warm import Program, Warm

pytestmark = [pytest.mark.faults, pytest.mark.dist, pytest.mark.slow]


def begin(warm: Warm, folder: Path, *options: str) -> Program:
    folder.mkdir(exist_ok=True)
    run = ["-m", "tests.faults.fault_run", str(folder), "--strategy=sketch_ddp", "--devices=2"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = folder / f"output{len(list(folder.glob('output*')))}.txt"
    return warm.begin(*launcher, *run, *options, output=output)


def test_torchrun_passes_a_signal_on_and_ends_all_processes_where_one_dies(
    warm: Warm, tmp_path: Path
) -> None:
    folder = tmp_path / "disturbed"
    run = begin(warm, folder, "--pause=0.3")
    run.wait_for("batch 1")
    both = children(run.pid)
    assert len(both) == 2
    os.kill(run.pid, signal.SIGTERM)
    code, output = run.finish()
    assert code != 0  # torchrun's own; its processes end with 143
    assert "ends with exit code 143; go on with ckpt_path=last" in output
    assert all(is_gone(pid, 5) for pid in both)

    run = begin(warm, folder, "--pause=0.3")
    run.wait_for("batch 3")
    both, start = children(run.pid), time.monotonic()
    os.kill(both[1], signal.SIGKILL)
    code, output = run.finish()
    assert code != 0
    assert all(is_gone(pid, 5) for pid in both)
    assert time.monotonic() - start < 60

    for name in ("disturbed", "straight"):
        code, output = begin(warm, tmp_path / name).finish(120)
        assert code == 0, output
    found, expected = (
        torch.load(tmp_path / name / "end.pt", weights_only=True)
        for name in ("disturbed", "straight")
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)
