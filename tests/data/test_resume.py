"""A run goes on at the prompt where it stopped, also in batches of another size."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from logra_lightning.checkpoints.interrupted_batch import make_batch_again
from logra_lightning.data import PromptLoader, TokenizedPrompts, follow_loader
from logra_lightning.data.order import shuffled
from logra_lightning.types import PromptBatch
from tests.data.rows import ROWS, Fixed


class Watched(LightningModule):
    """Remembers the rows of each epoch, and breaks off in the middle of a batch where it should."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs: list[list[int]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)

    def on_train_start(self) -> None:
        follow_loader(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        make_batch_again(checkpoint, self.trainer)

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        if not self.epochs:  # Lightning's hook is for epochs that begin
            self.epochs.append([])
        self.epochs[-1] += batch.rows
        optimizer: Any = self.optimizers()
        optimizer.step()

    @property
    def seen(self) -> list[int]:
        return [row for epoch in self.epochs for row in epoch]


class Validated(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validated.append(batch.rows)


class SaveAt(Callback):
    """Saves within a batch, after one, after an epoch or after its validation, and stops."""

    def __init__(self, path: Path, batches: int, where: str) -> None:
        self.path, self.batches, self.where = path, batches, where

    def save(self, trainer: Trainer, where: str) -> None:
        if self.where == where and trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.batches:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.save(trainer, "within")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.save(trainer, "after")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.save(trainer, "validated")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.save(trainer, "epoch")


def prompts(n: int, first: int = 0) -> TokenizedPrompts:
    return TokenizedPrompts(
        [[i + 1] for i in range(first, first + n)], [{"x": i} for i in range(n)], list(range(n))
    )


def run(tmp_path: Path, data: Any, ckpt: Path | None = None, **options: Any) -> Watched:
    """Fit two epochs of a loader, or of a data module."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "default_root_dir": tmp_path,
    }
    module, given = Watched(), {"train_dataloaders": data}
    if isinstance(data, Fixed):
        module, given = Validated(), {"datamodule": data}
    with suppress(KeyboardInterrupt, SystemExit):
        Trainer(**(defaults | options)).fit(module, **given, ckpt_path=ckpt, weights_only=True)
    return module


def stopped(tmp_path: Path, data: Any, batches: int, where: str, **options: Any) -> Watched:
    save = SaveAt(tmp_path / "x.ckpt", batches, where)
    return run(tmp_path, data, callbacks=[save], **options)


def loader(n: int, batch_size: int, **options: Any) -> PromptLoader:
    return PromptLoader(prompts(n), batch_size, **({"seed": 0} | options))


def orders(n: int, size: int, batches: int, next_size: int) -> list[list[int]]:
    """What each of two epochs gives out: `batches` of one size, then batches of another."""
    found = []
    for epoch in range(2):
        here = min(batches, n // size)
        batches -= here
        given = here * size
        is_over = given > 0 and n - given < max(size, next_size)
        if not is_over and not batches:
            given += (n - given) // next_size * next_size
        found.append(shuffled(n, 0, epoch)[:given])
    return found


@pytest.mark.parametrize("where", ["within", "after"])
@pytest.mark.parametrize(
    ("n", "size", "batches", "next_size"),
    [
        (12, 3, 2, 3),
        (12, 3, 2, 4),  # two prompts are left out
        (12, 3, 2, 2),
        (12, 4, 1, 12),  # no batch of twelve is left in the first epoch
        (11, 4, 2, 2),  # the first epoch was over, although a batch of two would be left
        (11, 4, 3, 5),
        (12, 3, 6, 2),
    ],
)
def test_each_epoch_gives_out_each_prompt_once_whatever_the_batches(
    tmp_path: Path, n: int, size: int, batches: int, next_size: int, where: str
) -> None:
    within = where == "within"
    first = stopped(tmp_path, loader(n, size), batches + within, where)
    second = run(tmp_path, loader(n, next_size), tmp_path / "x.ckpt")
    assert len(first.seen) == batches * size
    expected = orders(n, size, batches, next_size)
    assert first.seen + second.seen == expected[0] + expected[1]
    assert second.epochs[-1] == expected[1][len(expected[1]) - len(second.epochs[-1]) :]


@pytest.mark.parametrize("options", [{}, {"max_epochs": -1, "max_steps": 8}])
def test_a_checkpoint_of_the_end_of_an_epoch_is_followed_by_the_next(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    stopped(tmp_path, loader(12, 3), 4, "epoch", **options)
    assert run(tmp_path, loader(12, 3), tmp_path / "x.ckpt", **options).seen == shuffled(12, 0, 1)


@pytest.mark.parametrize(("batches", "where"), [(2, "after"), (4, "after"), (4, "epoch")])
def test_other_data_is_begun_at_its_start_and_said(
    tmp_path: Path, batches: int, where: str
) -> None:
    stopped(tmp_path, loader(12, 3), batches, where)
    other = PromptLoader(prompts(10, first=50), 3, seed=0)
    with pytest.warns(UserWarning, match="prompts are not those of the checkpoint.*begins with"):
        after = run(tmp_path, other, tmp_path / "x.ckpt")
    begun = 2 if batches == 2 else 1  # epochs of the two that Lightning was asked for
    expected = [row for epoch in range(begun) for row in shuffled(10, 0, epoch)[:9]]
    assert after.seen == expected


@pytest.mark.parametrize("options", [{"limit_train_batches": 2}, {"limit_train_batches": 0.4}])
def test_limited_epochs_go_through_all_prompts(tmp_path: Path, options: dict[str, Any]) -> None:
    options |= {"max_epochs": 4}
    straight = run(tmp_path, loader(15, 3), **options)
    assert [len(rows) for rows in straight.epochs] == [6] * 4
    assert straight.seen == shuffled(15, 0, 0) + shuffled(15, 0, 1)[:9]
    for batches, where in ((3, "after"), (4, "within"), (4, "epoch")):
        first = stopped(tmp_path, loader(15, 3), batches, where, **options)
        second = run(tmp_path, loader(15, 3), tmp_path / "x.ckpt", **options)
        assert first.seen + second.seen == straight.seen


@pytest.mark.parametrize("batches", [2, 0.5])
def test_overfitting_repeats_the_first_batches(tmp_path: Path, batches: int | float) -> None:
    def data() -> Fixed:
        return Fixed(val=ROWS[:3], eval_batch_size=1)  # ten rows: five batches

    straight = run(tmp_path, data(), overfit_batches=batches, max_epochs=3)
    assert straight.epochs == [[0, 1, 2, 3]] * 3
    for stop, where in ((1, "after"), (4, "within"), (4, "after"), (2, "epoch")):
        options = {"overfit_batches": batches, "max_epochs": 3}
        first = stopped(tmp_path, data(), stop, where, **options)
        second = run(tmp_path, data(), tmp_path / "x.ckpt", **options)
        assert first.seen + second.seen == straight.seen


def test_a_reloaded_loader_goes_on(tmp_path: Path) -> None:
    data = Fixed(val=ROWS[:3])
    reloaded = run(tmp_path, data, reload_dataloaders_every_n_epochs=1, limit_train_batches=2)
    assert reloaded.seen == shuffled(10, 0, 0)[:8]
    again = run(tmp_path, data, limit_train_batches=2)  # another fit begins at the start
    assert again.seen == reloaded.seen


@pytest.mark.parametrize("next_size", [2, 3])
@pytest.mark.parametrize(("batches", "where"), [(5, "validated"), (5, "after"), (2, "within")])
def test_validation_at_the_end_of_an_epoch_changes_nothing(
    tmp_path: Path, batches: int, where: str, next_size: int
) -> None:
    options = {"limit_val_batches": 1}
    first = stopped(tmp_path, Fixed(val=ROWS[:3]), batches, where, **options)
    data = Fixed(val=ROWS[:3], prompts_per_step=next_size, eval_batch_size=2)
    second = run(tmp_path, data, tmp_path / "x.ckpt", **options)
    expected = orders(10, 2, batches - (where == "within"), next_size)
    assert first.seen + second.seen == expected[0] + expected[1]
    assert isinstance(second, Validated)
    assert second.validated[-1] == [0, 1]


def test_a_trial_run_takes_one_batch(tmp_path: Path) -> None:
    assert run(tmp_path, Fixed(val=ROWS[:3]), fast_dev_run=True).seen == shuffled(10, 0, 0)[:2]
