"""Peak memory of a piece of code in a process of its own, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

_SCRIPT = """
import resource, torch
torch.set_num_threads(2)
{setup}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{code}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak_bytes(setup: str, code: str) -> int:
    """How far `code` raises the resident memory above its highest during `setup`."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(setup=setup, code=code)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)
