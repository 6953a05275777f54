"""What the worker processes of `MathReward` do: parse and compare with math-verify, unlimited.

Loaded there without its package (see `pool_process`), so it should import nothing of it.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any


class MathGrader:
    """Compares answers by math-verify without its own alarms, which need a main thread."""

    def prepare(self) -> None:
        """Import math-verify and what a comparison needs, before the first worker is forked."""
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # A square that must be expanded: half a second of sympy is imported at the first of them.
        texts = (r"$(x + \frac12)^2$", r"$x^2 + x + \frac14$")
        wanted, given = (parse(text, parsing_timeout=None) for text in texts)
        verify(wanted, given, timeout_seconds=None)

    def usable(self, gold: str) -> bool:
        """Whether a gold answer can be parsed."""
        return bool(_parsed_gold(gold))

    def equal(self, gold: str, answer: str, is_text: bool) -> bool | None:
        """Whether an answer equals the gold one; None where the gold cannot be parsed.

        Args:
            gold: a gold answer, normalized.
            answer: an answer, normalized; or a text in which math-verify looks for one.
            is_text: which of the two.
        """
        from math_verify import verify

        parsed = _parsed_gold(gold)
        if not parsed:
            return None
        return bool(verify(parsed, _parse(answer, is_text), timeout_seconds=None))

    def canonical(self, answer: str, is_text: bool) -> str | None:
        """One spelling for equal answers, as far as evaluation goes; None where there is none.

        Args:
            answer: as for `equal`.
            is_text: as for `equal`.
        """
        import sympy  # type: ignore[import-untyped]

        found = _parse(answer, is_text)
        if not found:
            return None
        value = found[0]
        if isinstance(value, sympy.Equality) and isinstance(value.lhs, sympy.Symbol):
            value = value.rhs
        return str(value.doit() if isinstance(value, sympy.Basic) else value)


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    """Empty where nothing but the text itself is understood."""
    found = _parse(gold, False)
    return found if found and not isinstance(found[0], str) else []


def _parse(answer: str, is_text: bool) -> list[Any]:
    from math_verify import parse

    return list(parse(answer if is_text else f"${answer}$", parsing_timeout=None))
