"""Seeds that depend only on what they are for, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed from 0 to 2**63 - 1 for what the parts say.

    For instance `derive_seed(run_seed, step, process_index, "rollout")`. The same parts give the
    same seed on every platform and in every process; other parts give an unrelated one.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
