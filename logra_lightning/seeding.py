"""Seeds that depend only on what they are for, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

_seed_for_all = 0


def derive_seed(*parts: int | str) -> int:
    """A seed from 0 to 2**63 - 1 for what the parts say.

    For instance `derive_seed(run_seed, step, process_index, "rollout")`. The same parts give the
    same seed on every platform and in every process; other parts give an unrelated one.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def seed_for_all(seed: int) -> Iterator[None]:
    """Within it, `seed` is that of everything that is made without a seed of its own."""
    global _seed_for_all
    before, _seed_for_all = _seed_for_all, seed
    try:
        yield
    finally:
        _seed_for_all = before


def run_seed(seed: int | None) -> int:
    """Return a seed as it was given, or without one that of `seed_for_all`, which is 0 elsewhere.

    Args:
        seed: as given; None stands for none.
    """
    return _seed_for_all if seed is None else seed
