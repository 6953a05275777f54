"""Dense gradients summed over processes; a single process keeps its own."""

from __future__ import annotations

import torch
from torch import nn

from logra_lightning.distributed.gradients import sum_dense_gradients_


def test_one_process_keeps_its_gradients_and_their_absence() -> None:
    with_gradient, without = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    with_gradient.grad = torch.arange(6, dtype=torch.float32).view(2, 3)
    expected = with_gradient.grad.clone()
    sum_dense_gradients_([with_gradient, without], torch.device("cpu"))
    assert torch.equal(with_gradient.grad, expected)
    assert without.grad is None
    sum_dense_gradients_([], torch.device("cpu"))
