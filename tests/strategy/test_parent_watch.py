"""A process that waits for nothing but its parent's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from logra_lightning.strategy import parent_watch
from tests.faults.fault_run import children, is_gone

CHILD = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("parent_watch", {parent_watch.__file__!r})
watch = importlib.util.module_from_spec(spec)  # without the rest of the package
spec.loader.exec_module(watch)
watch._GRACE_S = float(sys.argv[2])
watch.exit_with_parent()
print("watching", flush=True)
time.sleep(float(sys.argv[1]))
print("ended")
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, *sys.argv[2:]])
time.sleep(float(sys.argv[1]))
"""


def command(parent_s: float, child_s: float, grace_s: float) -> list[str]:
    """A process that lives so long and starts a child that lives so long if it is let."""
    return [sys.executable, "-c", PARENT, str(parent_s), str(child_s), str(grace_s)]


@pytest.mark.faults
def test_a_child_that_is_asleep_ends_with_its_parent() -> None:
    run = command(parent_s=60, child_s=60, grace_s=1)
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert "watching" in parent.stdout.readline()
        (child,) = children(parent.pid)
        time.sleep(1.5)
        os.kill(child, 0)  # it lives as long as its parent
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert is_gone(child, 20)


@pytest.mark.faults
def test_a_child_comes_to_its_own_end_after_a_parent_that_ended_well() -> None:
    run = command(parent_s=1, child_s=4, grace_s=10)
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["watching", "ended"]
    assert not done.stderr
