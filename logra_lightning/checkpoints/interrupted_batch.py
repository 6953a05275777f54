"""A checkpoint saved in the middle of a batch lets the resumed run make that batch again."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def make_batch_again(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Put a loader's position back by the batch that it has given out and nobody has finished.

    Args:
        checkpoint: about to be saved; changed in place.
        trainer: tells whether a batch is under way.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if progress.ready <= progress.processed:
        return
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if "fingerprint" in state:  # the loader is a PromptLoader, which counts prompts
            state["position"] -= state["batch_size"]
