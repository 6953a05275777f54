"""No call in a pool overruns its limit, takes another call with it, or leaves a process behind."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logra_lightning.rewards.calls.pool import Outcome, Pool
from logra_lightning.rewards.calls.pool_process import pickled
from logra_lightning.rewards.calls.pool_worker import receive
from tests.conftest import ROOT
from tests.rewards.calls.pool_functions import Prepared, Unloadable, do

# Starts a pool in a process of its own, without the seconds that importing torch takes.
SCRIPT = f"""
import sys, threading, time, types
for name in ("logra_lightning", "logra_lightning.rewards"):
    package = types.ModuleType(name)
    package.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from logra_lightning.rewards.calls.pool import Pool
from tests.rewards.calls.pool_functions import do
pool = Pool(do, workers=2)
pids = [outcome.value[0] for outcome in pool.map([dict(what="where")], 60)]
print(pids[0], pool._forker.process.pid, flush=True)
if sys.argv[1] == "hang":
    pool.map([dict(what="count"), dict(what="hang")], 600)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(do, workers=3, memory_gib=2)
    yield pool
    pool.close()


def run(pool: Pool, *calls: object, timeout_s: float = 30.0) -> list[Outcome]:
    return pool.map([{"what": what} for what in calls], timeout_s)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Living processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until(claim: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_values_come_in_order_and_from_processes_without_torch(pool: Pool) -> None:
    assert [outcome.value for outcome in run(pool, *range(50))] == list(range(50))
    seen = [outcome.value for outcome in run(pool, *["where"] * 20)]
    assert {has_torch for _, has_torch in seen} == {False}
    assert os.getpid() not in {pid for pid, _ in seen}
    assert len({pid for pid, _ in seen}) <= 3
    assert pool.map([], 1.0) == []


def test_each_misdeed_costs_one_call_and_says_what_happened(pool: Pool) -> None:
    misdeeds = ["raise", "exit", "crash", "grow"]
    outcomes = run(pool, 1, *misdeeds, 2)
    assert [outcome.value for outcome in outcomes] == [1, None, None, None, None, 2]
    said = [str(outcome.error) for outcome in outcomes[1:-1]]
    assert said[0] == "KeyError: 'no such thing'"
    assert "pool_functions.py" in outcomes[1].error.__notes__[0]  # type: ignore[union-attr]
    assert said[1] == "its process died with exit status 3"
    assert said[2] == "its process died by SIGSEGV"
    assert said[3].startswith("MemoryError")


def test_calls_that_hang_are_killed_in_time_and_the_others_are_answered(pool: Pool) -> None:
    run(pool, 0)
    started = time.monotonic()
    outcomes = run(pool, "hang", 1, "count", 2, "hang", 3, timeout_s=1.0)
    assert time.monotonic() - started < 5
    assert [outcome.value for outcome in outcomes] == [None, 1, None, 2, None, 3]
    assert all(isinstance(outcomes[i].error, TimeoutError) for i in (0, 2, 4))
    assert run(pool, 4)[0].value == 4


def test_no_call_begins_or_goes_on_after_the_total(pool: Pool) -> None:
    run(pool, 0)
    started = time.monotonic()
    outcomes = pool.map([{"what": "hang"}] * 9, 20.0, total_s=0.5)
    assert time.monotonic() - started < 5
    assert all(isinstance(outcome.error, TimeoutError) for outcome in outcomes)


def test_what_a_killed_call_started_is_killed_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    pool = Pool(do, workers=1)
    (outcome,) = run(pool, "start another and hang", timeout_s=1.0)
    assert isinstance(outcome.error, TimeoutError)
    wait_until(lambda: not is_alive(int(file.read_text())))
    pool.close()


def test_it_works_from_threads(pool: Pool) -> None:
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(run, pool, i, "hang", i, timeout_s=0.5) for i in range(3)]
        for i, job in enumerate(jobs):
            outcomes = job.result()
            assert [outcome.value for outcome in outcomes] == [i, None, i]


def test_a_worker_that_dies_between_batches_is_replaced(pool: Pool) -> None:
    ((pid, _),) = [outcome.value for outcome in run(pool, "where")]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    assert [outcome.value for outcome in run(pool, 1, 2, 3, 4)] == [1, 2, 3, 4]


def test_a_forker_that_dies_takes_its_workers_with_it_and_is_replaced() -> None:
    pool = Pool(do, workers=1)
    ((worker, _),) = [outcome.value for outcome in run(pool, "where")]
    (forker,) = (pid for pid in children(os.getpid()) if worker in children(pid))
    threading.Timer(0.5, os.kill, (forker, signal.SIGKILL)).start()
    hanging, following = run(pool, "count", 5)
    assert str(hanging.error) == "its process died with the process that forked it"
    assert following.value == 5
    assert not is_alive(worker)
    pool.close()


def test_close_leaves_no_process_and_the_pool_usable() -> None:
    pool = Pool(do, workers=2)
    for _ in range(2):
        ((worker, _),) = [outcome.value for outcome in run(pool, "where")]
        (forker,) = (pid for pid in children(os.getpid()) if worker in children(pid))
        pool.close()
        assert not is_alive(worker)
        assert not is_alive(forker)
    pool.close()


def test_a_pool_that_is_forgotten_ends_its_processes() -> None:
    pool = Pool(do, workers=1)
    ((worker, _),) = [outcome.value for outcome in run(pool, "where")]
    del pool
    wait_until(lambda: not is_alive(worker))


def test_nothing_is_left_when_the_parent_exits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "exit"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))


def test_nothing_is_left_when_the_parent_is_killed_in_the_middle_of_a_call() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "hang"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        _, forker = map(int, parent.stdout.readline().split())
        wait_until(lambda: len(children(forker)) == 2)
        workers = children(forker)
        parent.kill()
    wait_until(lambda: not any(map(is_alive, [forker, *workers])))


def test_prepare_runs_once_before_the_workers_are_forked() -> None:
    pool = Pool(Prepared(), workers=2)
    outcomes = pool.map([{}] * 4, 30.0)
    assert all(prepared == parent for prepared, parent in (o.value for o in outcomes))
    pool.close()


def test_a_copy_has_processes_of_its_own(pool: Pool) -> None:
    for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        seen = {outcome.value[0] for outcome in run(other, *["where"] * 5)}
        assert seen.isdisjoint(outcome.value[0] for outcome in run(pool, *["where"] * 5))
        other.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_copy_of_this_process_starts_its_own(pool: Pool) -> None:
    (before,) = run(pool, "where")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            first, second = run(pool, 5, "where")
            code = 0 if first.value == 5 and second.value != before.value else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(pool, "where")[0].value == before.value


def test_a_call_that_cannot_be_sent_is_an_error_of_its_own(pool: Pool) -> None:
    first, second = run(pool, lambda: 1, 2)
    assert first.error is not None
    assert second.value == 2


@pytest.mark.parametrize(
    "file", ["calls/metric_log", "calls/pool_worker", "gym_task", "math_grader", "text", "thinking"]
)
def test_what_workers_load_by_path_needs_the_standard_library_alone(file: str) -> None:
    path = ROOT / "logra_lightning" / "rewards" / f"{file}.py"
    # -I -S: neither this folder nor installed packages can be imported.
    code = f"import runpy; runpy.run_path({str(path)!r}); print('loaded')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout == "loaded\n", done.stderr


def test_workers_do_not_run_the_started_script_again(tmp_path: Path) -> None:
    script, mark = tmp_path / "train.py", tmp_path / "mark"
    script.write_text(f"print('x', file=open({str(mark)!r}, 'a')){SCRIPT}")
    done = subprocess.run(
        [sys.executable, str(script), "exit"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert len(done.stdout.split()) == 2, done.stderr  # a worker has answered
    assert mark.read_text() == "x\n"


def test_a_message_is_read_whole_and_ends_where_the_sender_does() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: [theirs.send(b"abc") for _ in range(4)])
        writer.start()
        assert receive(ours, 10) == b"abcabcabca"
        writer.join()
        theirs.close()
        assert receive(ours, 10) == b"bc"


def test_callees_that_no_other_process_can_load_are_refused() -> None:
    for refuse in (Pool, pickled):
        with pytest.raises(ValueError, match="be pickled .*: define it at the top of a module"):
            refuse(lambda: 1)
    with pytest.raises(ValueError, match="(?s)cannot be loaded by another .*only in the test's"):
        Pool(Unloadable()).map([{}], 1.0)
    with pytest.raises(ValueError, match="at least one worker and memory above 0, got 0"):
        Pool(do, workers=0)


def test_callees_of_the_started_script_are_refused() -> None:
    code = SCRIPT.replace("Pool(do,", "Pool(mine,").replace("pool = ", "def mine(): ...\npool = ")
    done = subprocess.run(
        [sys.executable, "-c", code, ""], capture_output=True, text=True, cwd=ROOT
    )
    assert "define it in a module of its own" in done.stderr
