"""A checkpoint of the middle of a batch points to the beginning of that batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logra_lightning.checkpoints.interrupted_batch import make_batch_again


@pytest.mark.parametrize(("ready", "processed", "position"), [(3, 2, 8), (3, 3, 12)])
def test_a_batch_under_way_is_given_out_again(ready: int, processed: int, position: int) -> None:
    current = SimpleNamespace(ready=ready, processed=processed)
    epoch_loop = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=epoch_loop))
    of_prompts = {"epoch": 0, "position": 12, "batch_size": 4, "fingerprint": "0f9b"}
    loaders = [dict(of_prompts), {"position": 5}]
    state = {"state_dict": {"combined_loader": loaders}}
    make_batch_again({"loops": {"fit_loop": state}}, trainer)
    assert loaders == [of_prompts | {"position": position}, {"position": 5}]
