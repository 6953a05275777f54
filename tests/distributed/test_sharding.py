"""Sharded weights: what a process holds, and all of it; plain weights are left alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from logra_lightning.distributed.sharding import (
    gathered,
    gathered_through_backward,
    held_rows,
    is_sharded,
    local,
    on_first_process,
    rows_from_first_process,
    squared_norms,
    whole,
)
from tests.two_processes import TwoProcesses


def hold_all_rows() -> None:
    process = torch.distributed.get_rank()
    for rows in (1, 2, 5, 8):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(rows)
            layer = nn.Linear(3, rows, dtype=dtype)
            full = layer.weight.detach().clone()
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
            weight = layer.weight
            held = held_rows(weight)
            assert is_sharded(weight)
            assert torch.equal(local(weight), full[held])
            assert torch.equal(whole(weight), full)
            other = torch.arange(rows * 3, dtype=torch.int16).view(rows, 3)
            assert torch.equal(whole(weight, other[held].clone()), other)
            kept = on_first_process(whole(weight))
            assert torch.equal(kept, full) if process == 0 else kept.numel() == 0
            norms = squared_norms([weight, full])
            assert abs(norms[0] - norms[1]) < 1e-3 * norms[1], norms
            local(weight).mul_(2)  # the memory that is gathered from
            with gathered(layer), gathered(layer):
                assert torch.equal(layer.weight, 2 * full)
                assert not is_sharded(layer.weight)
            assert layer.weight is weight
            x = torch.randn(4, 3, dtype=dtype).requires_grad_()
            with gathered_through_backward(layer, x) as y:
                out = (y @ layer.weight.t()).sum()
            assert not is_sharded(layer.weight)
            out.backward()
            assert layer.weight is weight
            torch.testing.assert_close(x.grad, (2 * full).sum(0).expand(4, 3))
            with torch.no_grad(), gathered_through_backward(layer, x):
                assert not is_sharded(layer.weight)
            assert is_sharded(layer.weight)


@pytest.mark.dist
def test_two_processes_hold_all_rows_between_them(two_processes: TwoProcesses) -> None:
    two_processes.run(hold_all_rows)


def receive_rows() -> None:
    process = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((1, 3), (2, 3), (5, 3), (8, 3), (7,), (5, 2, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            full = torch.arange(-30, 30, dtype=dtype)[: math.prod(shape)].view(shape)
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            fully_shard(layer, mesh=mesh)
            given = full if process == 0 else None
            rows = rows_from_first_process(layer.weight, given, torch.device("cpu"))
            assert torch.equal(rows, full[held_rows(layer.weight)])
            assert rows.dtype == dtype


@pytest.mark.dist
def test_process_0_sends_each_process_its_rows(two_processes: TwoProcesses) -> None:
    two_processes.run(receive_rows)


def test_a_plain_weight_is_held_whole() -> None:
    layer = nn.Linear(3, 4)
    assert not is_sharded(layer.weight)
    assert held_rows(layer.weight) == slice(0, 4)
    assert whole(layer.weight).data_ptr() == layer.weight.data_ptr()
    assert local(layer.weight).data_ptr() == layer.weight.data_ptr()
    assert torch.equal(on_first_process(layer.weight), layer.weight)
    weight = layer.weight.detach().to(torch.float64)
    assert squared_norms([layer.weight]) == pytest.approx([weight.square().sum().item()])
    assert squared_norms([]) == []
    x = torch.randn(2, 3).requires_grad_()
    with gathered(layer), gathered_through_backward(layer, x) as y:
        assert y is x
