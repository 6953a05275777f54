"""Seeds as a pure function of what they are for, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) for, say, `(seed, step, rank, "rollout")`.

    Different parts give unrelated seeds, on every platform and in every process.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
