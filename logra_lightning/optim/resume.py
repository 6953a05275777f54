"""A resumed run keeps the hyper-parameters of its command line, and says which it overruled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer


def tell_overruled(optimizers: Iterable[Optimizer], lr_scheduler_configs: Iterable[Any]) -> None:
    """Say which hyper-parameters of a checkpoint do not hold, and let schedulers start from ours.

    Args:
        optimizers: those of the Trainer, after a checkpoint was loaded into them, if one was.
        lr_scheduler_configs: those of the Trainer; Lightning restores their first learning rates.
    """
    for optimizer in optimizers:
        for name, (then, now) in getattr(optimizer, "overruled", {}).items():
            rank_zero_info(f"{name} is {now} now; the checkpoint had {then}.")
    for config in lr_scheduler_configs:
        if hasattr(config.scheduler, "base_lrs"):
            groups = config.scheduler.optimizer.param_groups
            config.scheduler.base_lrs = [group["initial_lr"] for group in groups]
