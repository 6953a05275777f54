"""What processes tell each other, in one process and in two."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.distributed.processes import (
    all_or_none,
    backend_for,
    copy_from_first_process_,
    counts_over_processes,
    from_first_process,
    leave_group_at_exit,
    num_processes,
    of_all_processes,
    process_index,
    sum_over_processes_,
)
from tests.two_processes import TwoProcesses


def test_one_process_keeps_what_it_has() -> None:
    value = torch.tensor([1.0, 2.0])
    assert (num_processes(), process_index()) == (1, 0)
    assert of_all_processes(value)[0] is value
    assert sum_over_processes_(value) is value
    assert counts_over_processes(3, 4) == [3, 4]
    copy_from_first_process_([value])
    assert value.tolist() == [1, 2]
    assert from_first_process(value) is value
    assert all_or_none(lambda: value) is value
    with pytest.raises(ZeroDivisionError):
        all_or_none(lambda: 1 / 0)


def share() -> None:
    me = process_index()
    assert (num_processes(), torch.distributed.get_rank()) == (2, me)
    assert of_all_processes({"process": me}) == [{"process": 0}, {"process": 1}]
    assert counts_over_processes(me + 1, 10) == [3, 20]
    totals = [[3.0, 4.0], [5.0, 12.0]]
    assert sum_over_processes_(torch.tensor(totals[me], dtype=torch.float64)).tolist() == [8, 16]
    weight = torch.full((2,), float(me + 1))
    copy_from_first_process_([weight])
    assert weight.tolist() == [1, 1]
    assert from_first_process("first" if me == 0 else None) == "first"
    assert all_or_none(lambda: me) == me
    fail_together(me)


def fail_together(me: int) -> None:
    """What fails in process 0, in process 1 or in both fails alike in both."""

    def fail_in(process: int) -> None:
        if me == process:
            raise ValueError("no such folder")

    def fail_everywhere() -> None:
        raise KeyError(me) if me else FileNotFoundError("gone")

    for process in (0, 1):
        with pytest.raises(ValueError, match="^no such folder$"):
            all_or_none(lambda process=process: fail_in(process))  # type: ignore[misc]
    with pytest.raises((FileNotFoundError, RuntimeError), match="^gone$"):
        all_or_none(fail_everywhere)


@pytest.mark.dist
def test_two_processes_share_what_each_has(two_processes: TwoProcesses) -> None:
    two_processes.run(share)


def test_values_travel_by_gloo_where_tensors_travel_by_nccl() -> None:
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert backend_for(torch.device("cpu")) is None  # gloo, as Lightning chooses


def test_a_group_is_left_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit, left = [], []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(1))
    leave_group_at_exit()
    at_exit[0]()
    assert not left  # there is no group
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    at_exit[0]()
    assert left
