"""Processes that no longer hold the same end the run, at the first step or at a later check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from logra_lightning.distributed.processes import process_index
from logra_lightning.strategy import agreement, mixin
from tests.conftest import make_llama
from tests.split_runs import build, own_folder, run
from tests.two_processes import TwoProcesses

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]


class Drift(Callback):
    """Changes something in process 1 alone, before a step."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step != self.step or process_index() != 1:
            return
        weight = next(module.policy.parameters())
        if self.what == "a weight":
            with torch.no_grad():
                weight.view(-1)[0] += 1e-3
        else:
            state = trainer.optimizers[0].state
            next(s["row_moment"] for s in state.values() if "row_moment" in s).add_(1)


def drift(folder: Path, strategy: str, what: str, step: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixin, "EVERY_STEPS", 2)
        with pytest.raises(RuntimeError) as error:
            run(own_folder(folder), 2, build(), 4, strategy=strategy, more=[Drift(what, step)])
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "what", "step", "told_at"),
    [("sketch_ddp", "a weight", 0, 0), ("sketch_fsdp", "a moment", 1, 2)],
)
def test_processes_that_drift_apart_end_the_run_in_one_line(
    two_processes: TwoProcesses, tmp_path: Path, strategy: str, what: str, step: int, told_at: int
) -> None:
    first, second = two_processes.run(drift, tmp_path, strategy, what, step)
    assert first == second
    assert "\n" not in first
    assert first.startswith(f"step {told_at}: processes 0 and 1 no longer hold the same: the ")
    assert ("the weight " if what == "a weight" else "the direction of ") in first


def test_one_bit_of_one_element_is_seen() -> None:
    model = make_llama().to(torch.bfloat16)
    before = agreement._sums(model, None)
    model.lm_head.weight.data.view(torch.int16)[3, 4] ^= 1
    after = agreement._sums(model, None)
    assert [name for name in after if after[name] != before[name]] == [
        "the weight 'lm_head.weight'"
    ]
