"""`MathGrader`: parses and compares answers with math-verify in the workers of `MathReward`.

The workers load this file by its path, without the package around it (see `calls/pool_process.py`),
so it imports nothing of the package.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any


class MathGrader:
    """Compares answers with math-verify, whose own time limits are off: those of the pool hold."""

    def prepare(self) -> None:
        """Import math-verify and what a comparison needs, before the first worker is forked."""
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # A square that must be expanded: half a second of sympy is imported at the first of them.
        texts = (r"$(x + \frac12)^2$", r"$x^2 + x + \frac14$")
        wanted, given = (parse(text, parsing_timeout=None) for text in texts)
        verify(wanted, given, timeout_seconds=None)

    def usable(self, gold: str) -> bool:
        """Return whether a gold answer can be parsed."""
        return bool(_parsed_gold(gold))

    def equal(self, gold: str, answer: str, is_text: bool) -> bool | None:
        """Return whether an answer equals the gold one; None if the gold one cannot be parsed.

        Args:
            gold: a gold answer, as `math_text.normalized` returns it.
            answer: an answer, normalized too; or a whole text that math-verify searches for one.
            is_text: whether `answer` is a whole text.
        """
        from math_verify import verify

        parsed = _parsed_gold(gold)
        if not parsed:
            return None
        return bool(verify(parsed, _parse(answer, is_text), timeout_seconds=None))

    def canonical(self, answer: str, is_text: bool) -> str | None:
        r"""Return a spelling that equal answers share; None if no answer is found.

        The answer is evaluated but not simplified: `\sqrt{8}` and `2\sqrt{2}` share one spelling,
        `(x+1)^2` and `x^2+2x+1` do not.

        Args:
            answer: an answer, normalized; or a whole text that math-verify searches for one.
            is_text: whether `answer` is a whole text.
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
    """The parsed gold answer; empty if math-verify understands no more than the text itself."""
    found = _parse(gold, False)
    return found if found and not isinstance(found[0], str) else []


def _parse(answer: str, is_text: bool) -> list[Any]:
    from math_verify import parse

    return list(parse(answer if is_text else f"${answer}$", parsing_timeout=None))
