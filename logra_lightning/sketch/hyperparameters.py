"""Hyper-parameters of an optimizer that goes on from a checkpoint: those of now hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def go_on_with(group: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Let a parameter group go on from a saved one with its own hyper-parameters.

    A learning rate keeps what a scheduler has made of it so far, as a factor.

    Args:
        group: of the optimizer as it was made for this run.
        saved: the same one in the checkpoint.

    Returns:
        Name of each hyper-parameter that differs to its value in the checkpoint and now.
    """
    first, first_saved = (g.get("initial_lr", g["lr"]) for g in (group, saved))
    own = {name: value for name, value in group.items() if name != "params"} | {"lr": first}
    before = {**saved, "lr": first_saved, "initial_lr": first_saved}
    if first == first_saved:
        group["lr"] = saved["lr"]
    else:
        group["lr"] = first * (saved["lr"] / first_saved if first_saved else 1.0)
    return {
        name: (before[name], value)
        for name, value in own.items()
        if name != "initial_lr" and name in before and before[name] != value
    }
