"""`last` and a folder mean the checkpoint that was written last, whichever callback wrote it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from logra_lightning.checkpoints.newest import (
    checkpoint_at,
    checkpoints_of_runs,
    chosen_checkpoint,
    newest,
    run_folder,
)


def write(path: Path, seconds: int, step: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step}, path)
    os.utime(path, (seconds, seconds))
    return str(path)


def made(tmp_path: Path, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "callbacks": list(callbacks),
        "max_steps": 6,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": CSVLogger(tmp_path, "runs"),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**defaults | options)


class Logs(BoringModel):
    def on_validation_epoch_end(self) -> None:
        self.log("eval/pass@1", float(self.global_step))


def test_the_newest_was_written_last_and_of_equals_has_the_highest_step(tmp_path: Path) -> None:
    old = write(tmp_path / "step=9.ckpt", 1, step=9)
    first, second = (
        write(tmp_path / f"{name}.ckpt", 2, step=s) for name, s in (("a", 7), ("b", 5))
    )
    link = tmp_path / "link.ckpt"
    link.symlink_to(tmp_path / "nowhere")
    assert newest([old, second, first, link]) == first
    assert newest([link]) == newest([]) == ""


def test_a_finished_run_of_lightnings_own_callbacks_is_found(tmp_path: Path) -> None:
    saves = ModelCheckpoint(monitor="eval/pass@1", mode="max", save_top_k=3)
    made(tmp_path, EarlyStopping("eval/pass@1", mode="max"), saves).fit(Logs())
    again = made(tmp_path, ModelCheckpoint(monitor="eval/pass@1", mode="max", save_top_k=3))
    found = chosen_checkpoint(again, "fit", "last")
    assert found
    assert torch.load(found, weights_only=True)["global_step"] == 6
    assert Path(found).parts[-3:-1] == ("version_0", "checkpoints")


def test_a_metrics_slash_in_a_name_hides_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "filename": "{step}-{eval/pass@1:.1f}",
        "dirpath": tmp_path / "saved",
    }
    made(tmp_path, ModelCheckpoint(**options)).fit(Logs())
    found = chosen_checkpoint(made(tmp_path, ModelCheckpoint(**options)), "validate", "last")
    assert found == str(tmp_path / "saved" / "step=6-eval" / "pass@1=6.0.ckpt")


def test_of_two_runs_in_one_folder_last_is_the_second(tmp_path: Path) -> None:
    for steps in (4, 2):
        saves = ModelCheckpoint(save_last=True)
        made(tmp_path, saves, logger=False, max_steps=steps).fit(Logs())
    folder = tmp_path / "checkpoints"
    assert {path.name for path in folder.glob("last*")} == {"last.ckpt", "last-v1.ckpt"}
    found = chosen_checkpoint(made(tmp_path, logger=False), "fit", "last")
    assert found
    assert torch.load(found, weights_only=True)["global_step"] == 2
    assert checkpoint_at(tmp_path).name == Path(found).name


def test_the_folder_of_this_version_comes_before_those_of_others(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    old = write(runs / "version_0" / "checkpoints" / "last.ckpt", 5)
    trainer = made(tmp_path, logger=CSVLogger(tmp_path, "runs", 1))
    assert run_folder(trainer) == runs / "version_1" / "checkpoints"
    assert checkpoints_of_runs(trainer) == {old}
    own = write(runs / "version_1" / "checkpoints" / "last.ckpt", 1)
    assert checkpoints_of_runs(trainer) == {own}


def test_last_is_found_without_a_callback_that_saves(tmp_path: Path) -> None:
    own = write(tmp_path / "checkpoints" / "last.ckpt", 1)
    trainer = made(tmp_path, enable_checkpointing=False, logger=False)
    assert chosen_checkpoint(trainer, "test", "last") == own


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_checkpoint_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, subcommand: str
) -> None:
    trainer = made(tmp_path, logger=False)
    with pytest.raises(
        ValueError, match="known only within the program .* the log folder has none"
    ):
        chosen_checkpoint(trainer, subcommand, "best")
    with pytest.raises(ValueError, match=r"there is no checkpoint 'a.ckpt': set ckpt_path to one"):
        chosen_checkpoint(trainer, subcommand, "a.ckpt")
    with pytest.raises(ValueError, match="no checkpoint in the folder"):
        chosen_checkpoint(trainer, subcommand, str(tmp_path))
    if subcommand == "fit":  # begins anew
        assert chosen_checkpoint(trainer, subcommand, "last") == "last"
    else:
        with pytest.raises(ValueError, match=f"last finds no checkpoint to {subcommand}"):
            chosen_checkpoint(trainer, subcommand, "last")
    saved = write(tmp_path / "checkpoints" / "last.ckpt", 1)
    with pytest.raises(ValueError, match=f"the newest one is {saved}$"):
        chosen_checkpoint(trainer, subcommand, "best")
    assert chosen_checkpoint(trainer, subcommand, str(tmp_path)) == saved


@pytest.mark.parametrize("path", [None, "hpc", "s3://bucket/last.ckpt", "registry:model"])
def test_what_lightning_alone_can_find_is_left_to_it(tmp_path: Path, path: str | None) -> None:
    assert chosen_checkpoint(made(tmp_path), "fit", path) == path
    remote = ModelCheckpoint(dirpath="memory://saved")
    assert chosen_checkpoint(made(tmp_path, remote), "fit", "last") == "last"
