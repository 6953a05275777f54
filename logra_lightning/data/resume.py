"""A resumed run: Lightning's count of batches follows the place of the training prompts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from logra_lightning.data.loader import PromptLoader


def follow_loader(trainer: Trainer) -> None:
    """Let Lightning count the batches of this epoch as the loader does that it goes on with.

    Lightning counts batches, a `PromptLoader` prompts. With batches of another size, or with other
    data, Lightning would end the epoch too early or too late: of 24 prompts, after 4 batches of 3,
    12 are left. In batches of 4 these are the last 3 of 6, so that Lightning is told that 3 are
    done.

    To be called when training starts, before the first batch.

    Args:
        trainer: has made its training loader, and read its checkpoint where it has one.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    if combined is None or len(loaders) != 1 or not isinstance(loaders[0], PromptLoader):
        return
    # Lightning leaves them unread where the checkpoint is of the end of an epoch.
    if loop._combined_loader_states_to_load:
        combined._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    loader = loaders[0]
    epochs: Any = loop.epoch_progress
    batches: Any = loop.epoch_loop.batch_progress
    loaded, loader.loaded = loader.loaded, None
    if loaded is None or not batches.current.processed:
        return
    if loaded.get("fingerprint") != loader.fingerprint:
        over = batches.is_last_batch
    elif (
        loaded["batch_size"] == loader.batch_size
        # A limit counts batches, whatever their size, and then epochs are not passes.
        or trainer.num_training_batches != len(loader)
    ):
        return
    else:
        over = loader.position == 0
    if over and epochs.current.processed < epochs.current.ready:
        epochs.increment_processed()
        epochs.increment_completed()
    batches.is_last_batch = False
    done = 0 if loader.position == 0 else len(loader) - loader.batches_left
    change = done - batches.current.processed
    # Each keeps its distance to the others: Lightning reads from it where the run was stopped.
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, getattr(batches.current, name) + change)
