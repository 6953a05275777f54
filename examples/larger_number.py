"""A task of one's own: rows, prompts and a reward. SmolLM2-135M learns it on two CPU cores.

    make smollm2

"Which number is larger, 12 or 7?" for all pairs of different numbers below 100; the last pairs of a
shuffled list are held out. `configs/smollm2_larger_number_cpu.yaml` names both names of this file.
"""

import random
import re
from typing import Any

from logra_lightning.data import Rows, TokenizedDataModule


def larger(completion: str, answer: str, other: str) -> float:
    """1 where the first number is the larger one, 0.2 where it is the other, else 0."""
    found = re.search(r"\d+", completion)
    if found is None:
        return 0.0
    return {answer: 1.0, other: 0.2}.get(found.group(), 0.0)


class LargerNumber(TokenizedDataModule):
    """Chat prompts with two numbers.

    Args:
        tokenizer: folder or hub name; the CLI sets it to `model.model`.
        val_size: pairs held out for validation.
        options: as in `TokenizedDataModule`.
    """

    def __init__(self, tokenizer: str, val_size: int = 128, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.val_size = val_size

    def load_rows(self) -> tuple[Rows, Rows]:
        pairs = [(a, b) for a in range(1, 100) for b in range(1, 100) if a != b]
        random.Random(0).shuffle(pairs)
        rows = [
            {
                "prompt": [{"role": "user", "content": f"Which number is larger, {a} or {b}?"}],
                "answer": str(max(a, b)),
                "other": str(min(a, b)),
            }
            for a, b in pairs
        ]
        return rows[: -self.val_size], rows[-self.val_size :]
