"""A schedule that follows the steps alone is taken, one that needs a metric is refused."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from logra_lightning.optim.scheduler import with_scheduler


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert with_scheduler(optimizer, None) is optimizer
    for make in (
        schedules.LinearLR,
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.StepLR(o, 2)], [3]),
        lambda o: schedules.LambdaLR(o, lambda step: 1.0),
    ):
        assert set(with_scheduler(optimizer, make)) == {"optimizer", "lr_scheduler"}
    with pytest.raises(ValueError, match=r"model\.lr_scheduler is ReduceLROnPlateau, .* metrics"):
        with_scheduler(optimizer, schedules.ReduceLROnPlateau)
