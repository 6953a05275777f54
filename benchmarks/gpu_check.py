"""What a GPU has to show: bits, gradients, KL, whole runs, launches, memory, vLLM.

    python benchmarks/gpu_check.py             # on a GPU, in at most 8 minutes
    python benchmarks/gpu_check.py --quick     # tiny sizes, two checks at a time, on a CPU too
    python benchmarks/gpu_check.py --only merge

No check has been run on a GPU yet. Each runs in a process of its own with a time limit, prints one
JSON line and is skipped where what it needs is not installed. Nothing is downloaded, and the
package need not be installed. Exits 1 if a check failed or ran out of time. The checks are in
`gpu_checks/`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MINUTES = 8  # for all checks together
CELL = 110  # characters of the table's last column

Record = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A function called `name` in a file of `gpu_checks/`, and what must be installed for it."""

    name: str
    file: str
    needs: tuple[str, ...]
    limit_s: int
    needs_gpu: bool = False


ALONE = ("torch", "numpy")
MODELS = (*ALONE, "lightning", "transformers")
WITH_VLLM = (*MODELS, "vllm")
# What tells most in the least time comes first.
CHECKS = [
    Check("projection", "bits", ALONE, 40),
    Check("merge", "bits", ALONE, 75),
    Check("capture", "models", MODELS, 60),
    Check("kl", "models", MODELS, 60),
    Check("quickstart", "quick_start", MODELS, 90),
    Check("launches", "large_steps", MODELS, 60),
    Check("kl_share", "large_steps", MODELS, 60),
    Check("peaks_1b", "large_steps", MODELS, 75),
    Check("vllm_float32", "with_vllm", WITH_VLLM, 150),
    Check("vllm_bfloat16", "with_vllm", WITH_VLLM, 150),
    Check("vllm_sleep", "with_vllm", WITH_VLLM, 150),
    Check("peaks_7b", "large_steps", MODELS, 90, needs_gpu=True),
]
# Called by `merge`, in a second process.
HELPERS = [Check("merge_bits", "bits", ALONE, 45)]
BY_NAME = {check.name: check for check in [*CHECKS, *HELPERS]}


class Report:
    """What a check finds; a part that raises is noted, and the next part begins.

    Args:
        device: `torch.device` to check.
        quick: use tiny sizes.
        tell: called whenever a part begins, so that a check that never ends has told the rest.
    """

    def __init__(self, device: Any, quick: bool, tell: Callable[[Report], None]) -> None:
        self.device, self.quick = device, quick
        self.figures: dict[str, Any] = {}
        self.reasons: list[str] = []
        self.at = ""
        self._tell = tell

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.at = name
        self._tell(self)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.reasons.append(f"{name}: {last_line(error)}")

    def need(self, holds: bool, what: str) -> None:
        """Note a failure, and go on."""
        if not holds:
            self.reasons.append(what)


def last_line(error: BaseException) -> str:
    """The last line of a traceback, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    hidden = ("site-packages", __file__)
    ours = [
        f for f in frames if str(ROOT) in f.filename and not any(h in f.filename for h in hidden)
    ]
    ours = ours or frames
    where = f" [{Path(ours[-1].filename).name}:{ours[-1].lineno}]" if ours else ""
    return traceback.format_exception_only(error)[-1].strip()[:400] + where


def record(
    name: str, outcome: str, seconds: float, figures: Any = None, reason: str = ""
) -> Record:
    return {
        "name": name,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "figures": figures or {},
        "reason": reason,
    }


def run_here(check: Check, quick: bool, tell: Callable[[Record], None]) -> Record:
    """Run a check in this process; `tell` gets a record of outcome `running` as parts begin."""
    start = time.perf_counter()
    missing = [name for name in check.needs if find_spec(name) is None]
    if missing:
        return record(check.name, "skip", 0, reason=f"needs {', '.join(missing)}")
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and (check.needs_gpu or not quick):
        hint = "" if check.needs_gpu else "; --quick needs none"
        return record(check.name, "skip", 0, reason=f"torch finds no CUDA device{hint}")

    def tell_part(report: Report) -> None:
        tell(seen("running", report))

    def seen(outcome: str, report: Report) -> Record:
        reason = report.at if outcome == "running" else "; ".join(report.reasons)
        return record(check.name, outcome, time.perf_counter() - start, report.figures, reason)

    report = Report(device, quick, tell_part)
    with report.part("import"):
        function = getattr(importlib.import_module(f"gpu_checks.{check.file}"), check.name)
        with report.part("whole"):
            function(report)
    return seen("fail" if report.reasons else "pass", report)


def run_apart(
    check: Check, quick: bool, limit_s: float, command: Sequence[str] | None = None
) -> Record:
    """Run a check in a process of its own, and end that after `limit_s`."""
    command = command or [
        sys.executable, __file__, "--only", check.name, *(["--quick"] if quick else [])
    ]  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    start, timed_out = time.perf_counter(), False
    # Files and no pipes, which a process that is left behind would keep open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.wait()
        out.seek(0)
        err.seek(0)
        said, errors = out.read(), err.read()
    found = last_record(said) or record(check.name, "running", 0)
    seconds = time.perf_counter() - start
    if found["outcome"] == "running":
        at, outcome = f" in part {found['reason']!r}" if found["reason"] else "", "timeout"
        reason = f"not done after {limit_s:.0f} s{at}"
        if not timed_out:
            line = (errors.strip().splitlines() or ["nothing"])[-1][:400]
            outcome, reason = "fail", f"exit code {process.returncode}{at}, which said: {line}"
        found = record(check.name, outcome, seconds, found["figures"], reason)
    if found["outcome"] in ("fail", "timeout"):
        print(f"--- {check.name} ---\n{errors[-3000:]}", file=sys.stderr, flush=True)
    return found | {"seconds": round(seconds, 1)}


def last_record(said: str) -> Record | None:
    """The last whole record among what a process said."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "outcome" in found:
                return found
    return None


def run_all(checks: Sequence[Check], quick: bool, minutes: float) -> Iterator[Record]:
    """A record for each check, in order; one that would begin after `minutes` is skipped."""
    deadline = time.perf_counter() + 60 * minutes

    def one(check: Check) -> Record:
        left = deadline - time.perf_counter()
        if left < min(5, check.limit_s):
            return record(check.name, "skip", 0, reason=f"no time left of {minutes:g} minutes")
        return run_apart(check, quick, min(check.limit_s, left))

    # One at a time where time and memory are measured.
    with ThreadPoolExecutor(2 if quick else 1) as pool:
        yield from pool.map(one, checks)


def table(records: Sequence[Record]) -> str:
    lines = ["| check | outcome | s | reason, or figures |", "|---|---|---|---|"]
    for found in records:
        text = found["reason"] or ", ".join(flat(found["figures"]))
        text = " ".join(text.split()).replace("|", "/")
        cut = text if len(text) <= CELL else text[: CELL - 3] + "..."
        lines.append(f"| {found['name']} | {found['outcome']} | {found['seconds']:.0f} | {cut} |")
    return "\n".join(lines)


def flat(figures: dict[str, Any], before: str = "") -> Iterator[str]:
    """Names and values of all figures but lists."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}: ")
        elif isinstance(value, float):
            yield f"{before}{name} {value:.3g}"
        elif not isinstance(value, list):
            yield f"{before}{name} {value}"


def only(check: Check, quick: bool) -> Record:
    """Run one check here; what else it prints goes to stderr, so that stdout has records alone."""
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)

        def tell(found: Record) -> None:
            print(json.dumps(found), file=stdout, flush=True)

        found = run_here(check, quick, tell)
        tell(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks on a GPU: bits, KL, runs, memory, vLLM.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on a CPU too")
    parser.add_argument("--only", choices=list(BY_NAME), help="run one check in this process")
    parser.add_argument("--json", type=Path, help="write all records here")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.only:
        records = [only(BY_NAME[args.only], args.quick)]
    else:
        records = []
        for found in run_all(CHECKS, args.quick, MINUTES):
            records.append(found)
            print(json.dumps(found), flush=True)
            if args.json:
                args.json.write_text(json.dumps(records, indent=2))
        print(table(records))
    if args.json:
        args.json.write_text(json.dumps(records, indent=2))
    sys.stdout.flush()
    if any(found["outcome"] in ("fail", "timeout") for found in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
