"""State of `RowAdam`: what it is called, how it is saved and loaded, which options go on.

A checkpoint holds state by the names of parameters, and all rows of it. So the number of processes,
the strategy and the order of the parameters may be others when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from logra_lightning.distributed.sharding import held_rows, is_sharded, on_first_process, whole
from logra_lightning.sketch.bank import SketchBank
from logra_lightning.sketch.projection import canonical_name

NamedParameters = Iterable[Parameter] | Iterable[tuple[str, Parameter]]
States = Mapping[Tensor, dict[str, Tensor]]


def parameter_names(params: NamedParameters, sketches: SketchBank) -> dict[Tensor, str]:
    """Each parameter to its name.

    A parameter that comes without one is called after its layer if it is sketched, for example
    `layers.0.q_proj.weight`, and else after its position, for example `parameter 3`.
    """
    sketched = {layer.module.weight: f"{layer.name}.weight" for layer in sketches}
    names: dict[Tensor, str] = {}
    for i, item in enumerate(params):
        if isinstance(item, Parameter):
            names[item] = sketched.get(item, f"parameter {i}")
        else:
            name, param = item
            names[param] = canonical_name(name)
    return names


def names_in_order(names: Mapping[Tensor, str], sketches: SketchBank) -> list[str]:
    """Names of all weights in the order of `names`; a sketched one is called after its layer.

    For `model.named_parameters()` that is the order in which the model lists its modules, as a rule
    that of the forward pass.
    """
    layers = {layer.module.weight: layer.name for layer in sketches}
    return [layers.get(param, name) for param, name in names.items()]


def partition(
    names: dict[Tensor, str], sketches: SketchBank
) -> tuple[list[Tensor], list[Parameter]]:
    """The sketched weights in the order of `sketches`, and the others that require a gradient.

    Raises:
        ValueError: a sketched weight has no name, so it is not among the optimizer's parameters.
    """
    sketched = {layer.module.weight: layer.name for layer in sketches}
    missing = [name for weight, name in sketched.items() if weight not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} sketched weights are not among params, first {missing[0]!r}: pass "
            f"all parameters of the model"
        )
    return list(sketched), [p for p in names if p.requires_grad and p not in sketched]  # type: ignore[misc]


def saved_states(states: States, names: Mapping[Tensor, str]) -> dict[str, dict[str, Tensor]]:
    """The state of each parameter by its name, for a checkpoint; every process must call it.

    Of a sharded weight the first process gets all rows, on the CPU, and the others get tensors
    [0].
    """
    return {
        names[param]: {key: _all_rows(param, value) for key, value in state.items()}
        for param, state in states.items()
    }


def load_states_(
    states: States, names: Mapping[Tensor, str], saved: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Fill `states` from what `saved_states` gave, dtypes included.

    Of a sharded weight each process takes the rows that it holds: of [5, 5] on two processes the
    first takes rows 0-2 and the second rows 3-4.

    Raises:
        ValueError: the checkpoint lacks state of a parameter, or has some of one that is not here.
    """
    own = {names[param] for param in states}
    if lacking := sorted(own - set(saved)):
        raise ValueError(
            f"the checkpoint has no optimizer state of {len(lacking)} weights that train now, "
            f"first {lacking[0]!r}: resume with the same model, targets and model.train_others"
        )
    if more := sorted(set(saved) - own):
        raise ValueError(
            f"the checkpoint has optimizer state of {len(more)} weights that do not train now, "
            f"first {more[0]!r}: resume with the same model, targets and model.train_others"
        )
    for param, state in states.items():
        for key, value in saved[names[param]].items():
            has_rows = is_sharded(param) and value.shape == param.shape
            held = value[held_rows(param)] if has_rows else value
            state[key] = held.detach().to(state[key].device, copy=True)


def saved_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Tensor, str]
) -> list[dict[str, Any]]:
    """Parameter groups with the names of their parameters, for a checkpoint."""
    return [{**group, "params": [names[param] for param in group["params"]]} for group in groups]


def load_groups_(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> dict[str, tuple[object, object]]:
    """Let each parameter group go on from the saved one, see `go_on_with`.

    Returns:
        Option to its value in the checkpoint and now, where they differ; a group's label comes
        before the name, such as `model.adamw lr`.
    """
    overruled: dict[str, tuple[object, object]] = {}
    for label, group, other in zip(labels, groups, saved, strict=False):
        changed = go_on_with(group, other)
        overruled |= {f"{label} {name}": values for name, values in changed.items()}
    return overruled


def settings_of(optimizer: Optimizer, sketches: SketchBank) -> dict[str, Any]:
    """What must be the same when a run is resumed, for a checkpoint."""
    has_residuals = any("residual" in optimizer.state[layer.module.weight] for layer in sketches)
    return {
        "rule": type(optimizer).__name__,
        "masters": "bf16 and a residual" if has_residuals else "fp32",
        "rank": sketches.rank,
        "projection_seed": sketches.seed,
        "projection": sketches.projection,
    }


def check_settings(own: dict[str, Any], saved: dict[str, Any] | None) -> None:
    """Raise ValueError where a checkpoint was not made with the settings of this run."""
    if saved != own:
        raise ValueError(
            f"the checkpoint's optimizer was made with {saved or 'no sketches'}, this one with "
            f"{own}: resume with the same strategy, optimizer and precision"
        )


def go_on_with(group: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Let a parameter group of this run go on from the saved one: its own options hold.

    Only the learning rate takes something over, the factor that a scheduler has made of it: where
    1e-3 had become 5e-4 in the checkpoint and this run was started with 4e-3, it goes on with 2e-3.

    Args:
        group: the group as it was made for this run; its `lr` is set.
        saved: the same group in the checkpoint.

    Returns:
        Name of each option that differs to its value in the checkpoint and its value now.
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


def _all_rows(param: Tensor, value: Tensor) -> Tensor:
    """A value of the state of `param`, all rows of it where the parameter is sharded."""
    if not is_sharded(param) or value.dim() < param.dim():
        return value
    return on_first_process(whole(param, value))
