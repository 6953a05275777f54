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
    listed = ", ".join(map(repr, islice(names, limit)))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (listed or "none") + more
