"""`Parameters`: the arguments that a function's signature names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameters:
    """The arguments that a function's signature names.

    Args:
        needed: names of the arguments without a default.
        optional: names of the arguments with a default.
        takes_all: whether the function has `**kwargs`, which take everything else.
    """

    needed: list[str]
    optional: list[str]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read them from a function's signature."""
        found = inspect.signature(function).parameters.values()
        named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            [p.name for p in named if p.default is p.empty],
            [p.name for p in named if p.default is not p.empty],
            any(p.kind is p.VAR_KEYWORD for p in found),
        )

    def among(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Pick the available arguments that the function asks for."""
        names = {*self.needed, *self.optional}
        return {n: v for n, v in available.items() if self.takes_all or n in names}
