"""What runs inside vLLM's workers: takes weights and factors, gives checksums and views.

`WorkerExtension` is mixed into vLLM's worker class by its qualified name; it may live in another
process than the trainer, so messages can be bytes.
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


def encode(message: Any) -> bytes:
    """Weights, factors and plain values as bytes, for another process."""
    file = io.BytesIO()
    torch.save(message, file)
    return file.getvalue()


def decode(data: bytes) -> Any:
    """The inverse of `encode`; refuses everything that these messages do not hold."""
    with torch.serialization.safe_globals([Block, Factors, PolicyWeight]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class WeightReceiver:
    """The weights of one worker.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout = layout_of(model)
        self._parameters = {name: p.data for name, p in model.named_parameters()}
        self._projections: dict[str, str] = {}
        self._residuals: dict[tuple[str, int], Tensor] = {}

    def device(self) -> str:
        """Kind of device that the weights are on."""
        return next(iter(self._parameters.values())).device.type

    def shapes(self) -> dict[str, list[int]]:
        """Name of each weight that is expected from the policy to its shape."""
        return {name: list(source.shape) for name, source in self.layout.items()}

    @torch.no_grad()
    def load(self, weights: Sequence[PolicyWeight]) -> None:
        """Write weights; of those with a projection, exact masters."""
        for weight in weights:
            for i, block in enumerate(self.layout[weight.name].blocks):
                target = self._place(block)
                tensor = block.of(weight.tensor).to(target.device)
                low = None if weight.residual is None else block.of(weight.residual)
                if low is not None:
                    low = low.to(target.device)
                self._residuals.pop((weight.name, i), None)
                if weight.projection is None:
                    target.copy_(tensor)
                elif target.dtype == torch.float32:
                    target.copy_(tensor if low is None else join(tensor, low))
                else:
                    residual = torch.zeros_like(target, dtype=torch.int16)
                    if tensor.dtype == torch.float32:
                        split_(tensor.clone(), target, residual)
                    else:
                        target.copy_(tensor)
                        if low is not None:
                            residual.copy_(low)
                    self._residuals[weight.name, i] = residual
            self._projections.pop(weight.name, None)
            if weight.projection is not None:
                self._projections[weight.name] = weight.projection

    def merge(self, updates: Sequence[Factors], others: Sequence[PolicyWeight]) -> None:
        """Merge updates into the masters in order, then write the others."""
        for factors in updates:
            for name, projection in self._projections.items() if factors.directions else ():
                source = self.layout[name]
                rows, columns = source.shape
                device = self._place(source.blocks[0]).device
                direction = factors.directions[projection].to(device)
                entries = factors.entries(projection, columns, device=device)
                for i, block in enumerate(source.blocks):
                    merge_(
                        self._place(block),
                        direction[block.row : block.row + block.rows],
                        entries[:, block.column : block.column + (block.columns or 0)],
                        decay=factors.decay,
                        residual=self._residuals.get((name, i)),
                        origin=(block.row, block.column),
                        shape=(rows, columns),
                    )
        self.load(others)

    def checksums(self) -> list[tuple[str, Block, int]]:
        """Of each block that is held; of its master where there is one."""
        return [
            (name, block, checksum(self._place(block), self._residuals.get((name, i))))
            for name, source in self.layout.items()
            for i, block in enumerate(source.blocks)
        ]

    def views(self) -> dict[str, Tensor]:
        """Name to the engine's own memory, for each weight that one worker holds whole."""
        return {
            name: self._place(source.blocks[0])
            for name, source in self.layout.items()
            if len(source.blocks) == 1 and self._place(source.blocks[0]).shape == source.shape
        }

    def _place(self, block: Block) -> Tensor:
        return block.place(self._parameters[block.parameter])


class WorkerExtension:
    """Methods added to vLLM's worker; `collective_rpc` calls them by name."""

    model_runner: Any
    logra_receiver: WeightReceiver | None = None

    def logra_call(self, method: str, message: Any) -> Any:
        """Call a method of the receiver with the arguments in `message`; bytes are answered so."""
        if self.logra_receiver is None:
            self.logra_receiver = WeightReceiver(self.model_runner.get_model())
        call = getattr(self.logra_receiver, method)
        return encode(call(*decode(message))) if isinstance(message, bytes) else call(*message)

    def logra_seed(self, seed: int) -> None:
        """Seed this process; who calls restores what it needs."""
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # vLLM's GPU sampler draws the seeds of requests from it
        torch.manual_seed(seed)
