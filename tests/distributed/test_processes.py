"""What processes tell each other, in one process and in two."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.distributed.processes import (
    copy_from_first_process_,
    counts_over_processes,
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


@pytest.mark.dist
def test_two_processes_share_what_each_has(two_processes: TwoProcesses) -> None:
    two_processes.run(share)
