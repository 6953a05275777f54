"""A task of your own, prompts and a reward, that SmolLM2-135M learns on two CPU cores.

    make smollm2

The prompts are "Which number is larger, 12 or 7?" for all pairs of different numbers below 100, in
shuffled order; the last ones are held out for validation. `configs/smollm2_larger_number_cpu.yaml`
trains on them: its `data` is `LargerNumber` of this file, its reward the function `larger`.
"""

import random
import re
from typing import Any

from logra_lightning.data import Rows, TokenizedDataModule


def larger(completion: str, answer: str, other: str) -> float:
    """Return 1 if the first number is the larger one, 0.2 if it is the other one, else 0."""
    found = re.search(r"\d+", completion)
    if found is None:
        return 0.0
    return {answer: 1.0, other: 0.2}.get(found.group(), 0.0)


class LargerNumber(TokenizedDataModule):
    """Prompts that ask which of two numbers is larger, as chats with one message.

    Args:
        tokenizer: folder or hub name of the tokenizer; the command line sets it to `model.model`.
        val_size: number of pairs to hold out for validation.
        options: further options of `TokenizedDataModule`.
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
