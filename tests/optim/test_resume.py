"""What a checkpoint had otherwise is said, and schedules begin at the learning rates of now."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from logra_lightning.optim.resume import tell_overruled


def test_overruled_values_are_said_and_schedules_start_from_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.base_lrs = [0.1]  # as a checkpoint restores it
    optimizer.overruled = {"model.adamw lr": (0.1, 0.5)}  # type: ignore[attr-defined]
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with caplog.at_level("INFO"):
        tell_overruled([optimizer, other], [SimpleNamespace(scheduler=scheduler)])
    assert scheduler.base_lrs == [0.5]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["model.adamw lr is 0.5 now; the checkpoint had 0.1."]
