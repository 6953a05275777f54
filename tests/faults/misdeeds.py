"""A reward and an engine that work for two batches, for runs that must say what went wrong."""

from __future__ import annotations

import time
from typing import Any

from logra_lightning.engines import TorchEngine
from logra_lightning.types import Completion

GOOD_CALLS = 40  # in the middle of the third batch of 16 completions


class Digits:
    """The sum of the digits, until a misdeed."""

    def __init__(self, misdeed: str = "") -> None:
        self.misdeed = misdeed
        self.calls = 0

    def __call__(self, completion: str) -> Any:
        self.calls += 1
        if self.calls > GOOD_CALLS:
            match self.misdeed:
                case "raise":
                    raise KeyError("no such thing")
                case "hang":
                    time.sleep(600)
                case "nonsense":
                    return "a lot"
        return float(sum(int(c) for c in completion if c.isdigit()))


class DyingEngine(TorchEngine):
    """Dies in the third batch."""

    calls = 0

    def generate(self, *args: Any, **options: Any) -> list[list[Completion]]:
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("the engine is gone")
        return super().generate(*args, **options)
