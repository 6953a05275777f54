"""What an optimizer's checkpoint is made of: names of parameters, and carried hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from logra_lightning.sketch.bank import SketchBank
from logra_lightning.sketch.projection import canonical_name

NamedParameters = Iterable[Parameter] | Iterable[tuple[str, Parameter]]


def named(params: NamedParameters, sketches: SketchBank) -> dict[Tensor, str]:
    """Each parameter to its name; one that came without is called by its sketch, or numbered."""
    sketched = {layer.module.weight: f"{layer.name}.weight" for layer in sketches}
    names: dict[Tensor, str] = {}
    for i, item in enumerate(params):
        if isinstance(item, Parameter):
            names[item] = sketched.get(item, f"parameter {i}")
        else:
            name, param = item
            names[param] = canonical_name(name)
    return names


def partition(
    names: dict[Tensor, str], sketches: SketchBank
) -> tuple[list[Tensor], list[Parameter]]:
    """The sketches's weights, in its order, and the others that require a gradient."""
    sketched = {layer.module.weight: layer.name for layer in sketches}
    missing = [name for weight, name in sketched.items() if weight not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} sketched weights are not among params, first {missing[0]!r}: pass "
            f"all parameters of the model"
        )
    return list(sketched), [p for p in names if p.requires_grad and p not in sketched]  # type: ignore[misc]


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
