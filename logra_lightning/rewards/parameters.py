"""`Parameters`: what a function asks for by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameters:
    """What a function's signature asks for.

    Args:
        needed: names without a default.
        optional: names with one.
        takes_all: whether it has `**kwargs`.
    """

    needed: list[str]
    optional: list[str]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Those of a function."""
        found = inspect.signature(function).parameters.values()
        named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            [p.name for p in named if p.default is p.empty],
            [p.name for p in named if p.default is not p.empty],
            any(p.kind is p.VAR_KEYWORD for p in found),
        )

    def among(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the available arguments that are asked for."""
        names = {*self.needed, *self.optional}
        return {n: v for n, v in available.items() if self.takes_all or n in names}
