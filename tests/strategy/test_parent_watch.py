"""A process that waits for nothing but its parent's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.fault_run import children, is_gone

PARENT = """
import subprocess, sys, time
child = "import sys, time; from logra_lightning.strategy.parent_watch import exit_with_parent; \\
exit_with_parent(); print('watching', flush=True); time.sleep(float(sys.argv[1])); print('ended')"
run = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.faults
def test_a_child_that_is_asleep_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, "60", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
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
    command = [sys.executable, "-c", PARENT, "11", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["watching", "ended"]
    assert not done.stderr
