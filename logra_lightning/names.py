"""How names are listed in messages: the first few of them, and how many more there are."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def named(names: Collection[str], limit: int = 3) -> str:
    """The first `limit` names, quoted, and how many are left out.

    `["a", "b", "c", "d"]` gives `'a', 'b', 'c' and 1 more`; no names give `none`.

    Args:
        names: names in the order in which they are listed.
        limit: how many names are written out.
    """
    return listed([repr(name) for name in names], limit)


def listed(things: Collection[str], limit: int = 3) -> str:
    """As `named`, without quotes: for things that are no names, such as `row 3 of 'gsm8k'`."""
    first = ", ".join(islice(things, limit))
    more = f" and {len(things) - limit} more" if len(things) > limit else ""
    return (first or "none") + more
