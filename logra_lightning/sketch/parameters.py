"""Which parameters are sketched, which train densely, and what checkpoints call them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from logra_lightning.sketch.bank import SketchBank
from logra_lightning.sketch.projection import canonical_name

NamedParameters = Iterable[Parameter] | Iterable[tuple[str, Parameter]]


def named(params: NamedParameters, sketches: SketchBank) -> dict[Tensor, str]:
    """Each parameter to its name; one that came without is called by its sketch, or numbered."""
    sketched = {sketch.module.weight: f"{sketch.name}.weight" for sketch in sketches}
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
    """The bank's weights, in its order, and the others that require a gradient."""
    sketched = {sketch.module.weight: sketch.name for sketch in sketches}
    missing = [name for weight, name in sketched.items() if weight not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} sketched weights are not among params, first {missing[0]!r}: pass "
            f"all parameters of the model"
        )
    return list(sketched), [p for p in names if p.requires_grad and p not in sketched]  # type: ignore[misc]
