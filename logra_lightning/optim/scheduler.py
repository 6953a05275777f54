"""`with_scheduler`: an optimizer with the schedule of its learning rate, for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch.optim import Optimizer


def with_scheduler(optimizer: Optimizer, make: Callable[[Optimizer], Any] | None) -> Any:
    """Return what `configure_optimizers` does: the optimizer, and its scheduler if there is one.

    Raises:
        ValueError: a step of the scheduler needs a metric.
    """
    if make is None:
        return optimizer
    scheduler = make(optimizer)
    parameters = signature(scheduler.step).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    if required:
        raise ValueError(
            f"model.lr_scheduler is {type(scheduler).__name__}, whose steps need "
            f"{', '.join(required)}, but it is advanced once per step by itself: set it to one "
            f"that follows the steps alone, such as torch.optim.lr_scheduler.LinearLR"
        )
    return {"optimizer": optimizer, "lr_scheduler": scheduler}
