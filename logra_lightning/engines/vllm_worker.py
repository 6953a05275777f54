"""What runs inside vLLM's workers: takes weights and factors, gives checksums and views.

vLLM mixes `WorkerExtension` into its worker class, which it finds by the qualified name. The worker
may run in another process than the trainer, so messages may come as bytes.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logra_lightning.engines.vllm_layout import layout_of
from logra_lightning.engines.weights import Block, PolicyWeight, checksum
from logra_lightning.sketch import Factors, merge_
from logra_lightning.sketch.master import join, split_

Misfit = tuple[int, list[str], list[str]]


def encode(message: Any) -> bytes:
    """Turn weights, factors and plain values into bytes, for another process."""
    file = io.BytesIO()
    torch.save(message, file)
    return file.getvalue()


def decode(data: bytes) -> Any:
    """The message that `encode` made bytes of; other types of objects are refused."""
    with torch.serialization.safe_globals([Block, Factors, PolicyWeight]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class WeightReceiver:
    """The weights of one worker, and the exact masters of those that factors update.

    Args:
        model: vLLM's model, or the part of it that runs in this worker.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout = layout_of(model)
        self._parameters = {name: p.data for name, p in model.named_parameters()}
        self._projections: dict[str, str] = {}  # of each weight with a master
        self._residuals: dict[tuple[str, int], Tensor] = {}

    def device(self) -> str:
        """The device that the weights are on, such as `cpu` or `cuda:1`."""
        return str(next(iter(self._parameters.values())).device)

    def shapes(self) -> dict[str, list[int]]:
        """Name to shape of each weight that the policy must have."""
        return {name: list(held.shape) for name, held in self.layout.items()}

    @torch.no_grad()
    def load(self, weights: Sequence[PolicyWeight]) -> None:
        """Write weights; keep an exact fp32 master of each that has a projection."""
        for weight in weights:
            for i, block in enumerate(self.layout[weight.name].blocks):
                place = self._place(block)
                tensor = block.of(weight.tensor).to(place.device)
                low = None if weight.residual is None else block.of(weight.residual)
                if low is not None:
                    low = low.to(place.device)
                self._residuals.pop((weight.name, i), None)
                if weight.projection is None:
                    place.copy_(tensor)
                elif place.dtype == torch.float32:
                    place.copy_(tensor if low is None else join(tensor, low))
                else:
                    residual = torch.zeros_like(place, dtype=torch.int16)
                    if tensor.dtype == torch.float32:
                        split_(tensor.clone(), place, residual)
                    else:
                        place.copy_(tensor)
                        if low is not None:
                            residual.copy_(low)
                    self._residuals[weight.name, i] = residual
            self._projections.pop(weight.name, None)
            if weight.projection is not None:
                self._projections[weight.name] = weight.projection

    def merge(self, updates: Sequence[Factors], others: Sequence[PolicyWeight]) -> Misfit | None:
        """Merge updates into the masters, in order, then write the other weights.

        Returns:
            None when all is merged. Where the directions of an update are not exactly those of the
            masters, nothing is merged, and the answer is the update's policy version, the names
            that no master has, and the names of masters that the update lacks.
        """
        for factors in updates:
            known, given = set(self._projections.values()), set(factors.directions)
            if given and given != known:
                return factors.version, sorted(given - known), sorted(known - given)
        for factors in updates:
            if factors.directions:
                self._merge(factors)
        self.load(others)
        return None

    def _merge(self, factors: Factors) -> None:
        for name, projection in self._projections.items():
            held = self.layout[name]
            rows, columns = held.shape
            device = self._place(held.blocks[0]).device
            direction = factors.directions[projection].to(device)
            entries = factors.entries(projection, columns, device=device)
            for i, block in enumerate(held.blocks):
                merge_(
                    self._place(block),
                    direction[block.row : block.row + block.rows],
                    entries[:, block.column : block.column + (block.columns or 0)],
                    decay=factors.decay,
                    residual=self._residuals.get((name, i)),
                    origin=(block.row, block.column),
                    shape=(rows, columns),
                )

    def checksums(self) -> list[tuple[str, Block, torch.dtype, int]]:
        """Weight, block, dtype and checksum of each block that this worker holds.

        Where a weight has a master, the checksum is the master's.
        """
        return [
            (
                name,
                block,
                self._place(block).dtype,
                checksum(self._place(block), self._residuals.get((name, i))),
            )
            for name, held in self.layout.items()
            for i, block in enumerate(held.blocks)
        ]

    def views(self) -> dict[str, Tensor]:
        """Name to the engine's own memory, for each weight that this worker holds in one piece."""
        return {
            name: self._place(held.blocks[0])
            for name, held in self.layout.items()
            if len(held.blocks) == 1 and self._place(held.blocks[0]).shape == held.shape
        }

    def _place(self, block: Block) -> Tensor:
        return block.place(self._parameters[block.parameter])


class WorkerExtension:
    """Methods added to vLLM's worker; `collective_rpc` calls them by name."""

    model_runner: Any
    logra_receiver: WeightReceiver | None = None

    def logra_call(self, method: str, message: Any) -> Any:
        """Call a method of the `WeightReceiver` and return its answer.

        Args:
            method: name of the method.
            message: its arguments, as a tuple or as bytes of one; the answer to bytes is bytes.
        """
        if self.logra_receiver is None:
            self.logra_receiver = WeightReceiver(self.model_runner.get_model())
        call = getattr(self.logra_receiver, method)
        return encode(call(*decode(message))) if isinstance(message, bytes) else call(*message)

    def logra_release(self) -> None:
        """Forget the model's parameters and what was kept beside them."""
        self.logra_receiver = None

    def logra_seed(self, seed: int) -> None:
        """Seed Python, numpy and torch in this process; the caller restores their states."""
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # vLLM's GPU sampler draws the seeds of requests from it
        torch.manual_seed(seed)
