"""`SketchStrategy`: gradient sketches on one device."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from logra_lightning.strategy.mixin import SketchMixin


class SketchStrategy(SketchMixin, SingleDeviceStrategy):
    """Gradient sketches on one device: `strategy: sketch`, with the options of `SketchMixin`."""

    strategy_name = "sketch"

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device; the Trainer sets it from `accelerator` and `devices`."""
        return getattr(self, "_devices", [])

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy 'sketch' trains on one device, got {len(devices)}: set "
                f"trainer.devices=1 or trainer.strategy=sketch_ddp"
            )
        self._devices = devices
        self._root_device = torch.device(devices[0])
