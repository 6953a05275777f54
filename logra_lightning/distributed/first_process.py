"""Makes a model that holds no weights the one that process 0 has loaded, weight by weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from logra_lightning.distributed.processes import (
    copy_from_first_process_,
    from_first_process,
    process_index,
)
from logra_lightning.distributed.sharding import rows_from_first_process


@dataclass(frozen=True)
class _Held:
    """One weight or buffer of a model, by all names that it has."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_weight: bool
    requires_grad: bool


class FirstProcessWeights:
    """The weights that process 0 has loaded, taken out of its model.

    Afterwards the models of all processes are alike: buffers are filled, weights are on the meta
    device, and tied, trainable and of a dtype as in process 0. Then shard the models, and call
    `fill_`. Every process must do all of this.

    Args:
        model: in process 0 the loaded model, in all others the same one without weights; changed
            in place.
        device: where buffers go.

    Raises:
        ValueError: the models differ in their modules or in the names of their weights.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        tensors = list(_tensors(model)) if process_index() == 0 else []
        told = from_first_process((_structure(model), [held for held, _ in tensors]))
        assert told is not None
        structure, self._held = told
        self._differs = "" if structure == _structure(model) else _difference(structure, model)
        self._model = model
        self._full = {held.names: tensor.detach() for held, tensor in tensors if held.is_weight}
        self._buffers = {held.names: tensor for held, tensor in tensors if not held.is_weight}
        self._device = device

    def check(self) -> None:
        """Raise ValueError where the model of this process is not that of process 0."""
        if self._differs:
            raise ValueError(self._differs)

    @torch.no_grad()
    def take_(self) -> None:
        """Make the models alike, and fill the buffers."""
        for held in self._held:
            made: Tensor = torch.empty(held.shape, dtype=held.dtype, device="meta")
            if held.is_weight:
                made = nn.Parameter(made, requires_grad=held.requires_grad)
            elif held.names in self._buffers:
                made = self._buffers[held.names].to(self._device).contiguous()
            else:
                made = torch.empty(held.shape, dtype=held.dtype, device=self._device)
            self._put(held, made)
            if not held.is_weight:
                copy_from_first_process_([made])
        self._buffers.clear()

    @torch.no_grad()
    def fill_(self) -> None:
        """Give each process its rows of each weight, one weight after the other.

        Process 0 frees a weight as soon as it has been sent.
        """
        for held in self._held:
            if not held.is_weight:
                continue
            weight, full = self._get(held), self._full.pop(held.names, None)
            if isinstance(weight, DTensor):
                rows = rows_from_first_process(weight, full, self._device)
                value: Any = DTensor.from_local(
                    rows,
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
            else:  # one that is not sharded is held whole
                empty = torch.empty(held.shape, dtype=held.dtype, device=self._device)
                value = empty if full is None else full.to(self._device).contiguous()
                copy_from_first_process_([value])
            self._put(held, nn.Parameter(value, requires_grad=held.requires_grad))
            del full

    def _get(self, held: _Held) -> Tensor:
        owner, _, name = held.names[0].rpartition(".")
        return getattr(self._model.get_submodule(owner), name)

    def _put(self, held: _Held, value: Tensor) -> None:
        for full_name in held.names:
            owner, _, name = full_name.rpartition(".")
            setattr(self._model.get_submodule(owner), name, value)


def _tensors(model: nn.Module) -> Iterator[tuple[_Held, Tensor]]:
    """All weights and buffers of a model, each one once."""
    for is_weight, named in (
        (True, model.named_parameters(remove_duplicate=False)),
        (False, model.named_buffers(remove_duplicate=False)),
    ):
        names: dict[int, list[str]] = {}
        found: dict[int, Tensor] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            found[id(tensor)] = tensor
        for key, tensor in found.items():
            shape, grad = tuple(tensor.shape), tensor.requires_grad
            yield _Held(tuple(names[key]), shape, tensor.dtype, is_weight, grad), tensor


def _structure(model: nn.Module) -> tuple[str, list[str]]:
    """What must be equal: the modules with their sizes, and all names."""
    weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    return repr(model), sorted(weights + buffers)


def _difference(told: tuple[str, list[str]], model: nn.Module) -> str:
    own = _structure(model)
    names = sorted(set(told[1]) ^ set(own[1]))
    pairs = zip(told[0].splitlines(), own[0].splitlines(), strict=False)
    lines = (f"{a.strip()} / {b.strip()}" for a, b in pairs if a != b)
    what = ", ".join(names[:3]) or next(lines, "its modules")
    return (
        f"the model that process 0 loaded is not the one that process {process_index()} built from "
        f"its config ({what}): give all processes the same model, packages and model.model_kwargs"
    )
