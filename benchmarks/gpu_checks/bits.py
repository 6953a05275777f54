"""Bits that must not depend on the device, the process or how a weight is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from logra_lightning.sketch import merge_
from logra_lightning.sketch.master import join, split
from logra_lightning.sketch.projection import PROJECTIONS, projection_key

CPU = torch.device("cpu")


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def digest(*tensors: Tensor) -> str:
    """16 hex digits of the bits, so that the records of two machines can be compared."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bits(tensor).to(CPU).numpy().tobytes())
    return found.hexdigest()[:16]


def same(report: Any, what: str, one: Tensor, other: Tensor) -> None:
    if one.device != other.device:
        one, other = one.to(CPU), other.to(CPU)
    differ = int((bits(one) != bits(other)).sum())
    report.need(differ == 0, f"{what}: {differ} of {one.nbytes} bytes differ")


# Bits on the CPU and on the device.


def projection(report: Any) -> None:
    """Projections, and masters in two halves, have the same bits on the CPU and on the device."""
    if report.device.type == "cuda":
        report.figures["gpu"] = torch.cuda.get_device_name(report.device)
    report.figures["torch"] = torch.__version__
    shapes = [(5, 130), (8, 64)] if report.quick else [(64, 130), (256, 1536), (256, 18944)]
    for kind, make in PROJECTIONS.items():
        with report.part(kind):
            for rank, width in shapes:
                key = projection_key(0, 3, f"layers.0.{kind}")
                here, there = (make(key, rank, width, device=d) for d in (CPU, report.device))
                same(report, f"{kind} [{rank}, {width}]", here, there)
                report.figures[f"{kind} {rank}x{width}"] = digest(there)
    with report.part("split and join"):
        size = 1000 if report.quick else 1 << 24
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator)
        ties = torch.arange(-4, 4) * 0x10000 + 0x3F808000
        master = torch.cat([patterns, ties]).to(torch.int32).view(torch.float32)
        here, there = split(master), split(master.to(report.device))
        for half, one, other in zip(("weight", "residual"), here, there, strict=True):
            same(report, f"split's {half}", one, other)
        same(report, "join after split", master, join(*there))


class Update:
    """A weight and what is merged into it, the same on every device."""

    def __init__(
        self, shape: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        master = torch.randn(shape, generator=generator) * 0.02
        direction = torch.randn(shape[0], rank, generator=generator) * 1e-4
        key = projection_key(0, 0, "layer")
        self.shape = shape
        self.entries = PROJECTIONS["rademacher"](key, rank, shape[1], device=device)
        self.direction = direction.to(device, torch.bfloat16)
        self.weight, self.residual = master.to(device), None
        if dtype == torch.bfloat16:
            self.weight, self.residual = split(self.weight)

    def merged(
        self, rows: slice = slice(None), columns: slice = slice(None), room: int = 0
    ) -> Tensor:
        """The master of a block after the merge; with `room` it lies within a larger tensor."""
        row, column = rows.start or 0, columns.start or 0
        weight = spacious(self.weight[rows, columns], room)
        residual = self.residual
        if residual is not None:
            residual = spacious(residual[rows, columns], room)
        merge_(
            weight,
            self.direction[rows],
            self.entries[:, columns],
            decay=0.999,
            residual=residual,
            origin=(row, column),
            shape=self.shape,
        )
        return weight if residual is None else join(weight, residual)

    def exact(self) -> Tensor:
        """The same in fp64."""
        master = self.weight if self.residual is None else join(self.weight, self.residual)
        product = self.direction.double() @ self.entries.double()
        return 0.999 * master.double() - product / self.entries.shape[0] ** 0.5


def spacious(block: Tensor, room: int) -> Tensor:
    """A copy of the block with `room` rows and columns of other memory on each side."""
    rows, columns = block.shape
    around = block.new_zeros(rows + 2 * room, columns + 2 * room)
    inner = around[room : room + rows, room : room + columns]
    inner.copy_(block)
    return inner


def updates(quick: bool, device: torch.device) -> dict[str, Update]:
    if quick:
        shapes, rank = [(65, 131), (2101, 70)], 8
    else:
        shapes, rank = [(1536, 1536), (8960, 1536), (1537, 4099), (4097, 2051)], 256
    return {
        f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}": Update(
            shape, rank, dtype, device
        )
        for shape in shapes
        for dtype in (torch.float32, torch.bfloat16)
    }


def merge(report: Any) -> None:
    """A merge has the same bits however the weight is cut, wherever it lies, in any process."""
    equal: dict[str, float] = {}
    report.figures["equal to the CPU's"] = equal
    made = updates(report.quick, report.device)
    for name, update in made.items():
        with report.part(name):
            whole = update.merged()
            error = (whole.double() - update.exact()).abs().max().item()
            report.need(error < 1e-7, f"{name}: {error:.1e} off the exact update")
            for parts in ([1000], [3], [1, 2049], [700, 1400]):
                check_cuts(report, name, update, whole, parts)
            same(report, f"{name} within a larger tensor", whole, update.merged(room=3))
            # No claim: a product in fp32 is summed in another order on another device.
            dtype = torch.float32 if update.residual is None else torch.bfloat16
            on_cpu = Update(update.shape, update.entries.shape[0], dtype, CPU).merged()
            equal[name] = (on_cpu == whole.to(CPU)).to(torch.float64).mean().item()
    with report.part("second process"):
        from gpu_check import BY_NAME, run_apart

        other = run_apart(BY_NAME["merge_bits"], report.quick, 45)
        report.need(not other["reason"], f"second process: {other['reason']}")
        own = merge_digests(made)
        report.figures["digests"] = own
        for state, digests in other["figures"].items():
            report.need(digests == own, f"other bits in a second process, {state}")
        report.figures["states of a second process"] = len(other["figures"])


def check_cuts(report: Any, name: str, update: Update, whole: Tensor, at: list[int]) -> None:
    for dim, size in enumerate(update.shape):
        edges = [0, *[edge for edge in at if edge < size], size]
        parts = [slice(*ends) for ends in pairwise(edges)]
        named = ("rows", "columns")[dim]
        blocks = [update.merged(**{named: part}) for part in parts]
        same(report, f"{name} cut into {named} at {edges}", whole, torch.cat(blocks, dim))


def merge_digests(made: dict[str, Update]) -> dict[str, str]:
    return {name: digest(update.merged()) for name, update in made.items()}


def merge_bits(report: Any) -> None:
    """Digests of all merges under each precision that a program may have set before."""

    def reduced() -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def by_backend() -> None:  # last: torch refuses to be asked in the old way from then on
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    states: dict[str, Callable[[], None]] = {
        "as it comes": lambda: None,
        "matmul precision high": partial(torch.set_float32_matmul_precision, "high"),
        "matmul precision medium": partial(torch.set_float32_matmul_precision, "medium"),
        "no reduction in bf16": reduced,
        "fp32_precision tf32": by_backend,
    }
    made = updates(report.quick, report.device)
    for name, set_it in states.items():
        with report.part(name):
            set_it()
            report.figures[name] = merge_digests(made)
            with torch.autocast(report.device.type, torch.bfloat16):
                report.figures[f"{name}, autocast"] = merge_digests(made)
