"""Under torchrun, which starts and ends the ranks, nothing is lost either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.faults.fault_run import children, finish, is_gone, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.dist, pytest.mark.slow]


def begin(folder: Path, *options: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = ["-m", "tests.faults.fault_run", str(folder), "--strategy=sketch_ddp", "--devices=2"]
    return subprocess.Popen(
        [sys.executable, "-u", *launcher, *run, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def test_torchrun_passes_a_signal_on_and_ends_all_ranks_where_one_dies(tmp_path: Path) -> None:
    folder = tmp_path / "disturbed"
    run = begin(folder, "--pause=0.3")
    wait_for(run, "batch 1")
    ranks = children(run.pid)
    os.kill(run.pid, signal.SIGTERM)
    code, output = finish(run)
    assert code != 0  # torchrun's own; its ranks end with 143
    assert "ends with exit code 143; go on with ckpt_path=last" in output
    assert all(is_gone(rank, 5) for rank in ranks)

    run = begin(folder, "--pause=0.3")
    wait_for(run, "batch 3")
    ranks, start = children(run.pid), time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    code, output = finish(run)
    assert code != 0
    assert all(is_gone(rank, 5) for rank in ranks)
    assert time.monotonic() - start < 60

    for name in ("disturbed", "straight"):
        code, output = finish(begin(tmp_path / name), 120)
        assert code == 0, output
    found, expected = (
        torch.load(tmp_path / name / "end.pt", weights_only=True)
        for name in ("disturbed", "straight")
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)
