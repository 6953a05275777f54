"""The last checkpoint is that of the last step, also when no validation follows it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from logra_lightning import PolicyModule, SketchAccumulation, SketchStrategy
from logra_lightning.callbacks import StepCheckpoint
from logra_lightning.callbacks.preemption import PreemptedError
from logra_lightning.checkpoints.checkpoint_io import AtomicCheckpointIO, CheckpointNotWrittenError
from logra_lightning.checkpoints.newest import newest
from logra_lightning.optim import AdamWOptions
from tests import runs


@pytest.mark.parametrize(("steps", "validate_every"), [(5, 3), (6, 3), (2, 100)])
def test_last_checkpoint_is_of_the_last_step(
    tmp_path: Path, steps: int, validate_every: int
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepCheckpoint(dirpath=tmp_path)],
        max_steps=steps,
        val_check_interval=validate_every,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("broken", ["", "weight", "moment"])
def test_a_run_that_ends_for_a_bad_gradient_saves_what_is_finite(
    tmp_path: Path, broken: str
) -> None:
    class BadGradients(BoringModel):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.global_step == 3:
                if broken == "weight":
                    self.layer.weight.data[0, 0] = torch.nan
                if broken == "moment":
                    optimizer.state[self.layer.weight]["momentum_buffer"][0, 0] = torch.inf
                raise FloatingPointError("nan")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    model = BadGradients()
    saves = StepCheckpoint(dirpath=tmp_path)
    trainer = boring_trainer(tmp_path, 9, saves)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(FloatingPointError):
            trainer.fit(model)
    told = [str(w.message) for w in caught if "no checkpoint is saved" in str(w.message)]
    if broken:
        assert told == [
            "no checkpoint is saved of this state, which is not finite: this run has saved none"
        ]
        assert not list(tmp_path.glob("*.ckpt"))
    else:
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert saved["global_step"] == 3
        torch.testing.assert_close(saved["state_dict"], model.state_dict(), rtol=0, atol=0)
        again = boring_trainer(tmp_path, 5, StepCheckpoint(dirpath=tmp_path))
        model = BoringModel()
        model.configure_optimizers = BadGradients.configure_optimizers.__get__(model)  # type: ignore[method-assign]
        again.fit(model, ckpt_path=str(tmp_path / "last.ckpt"))
        assert again.global_step == 5
        assert not told


@pytest.mark.usefixtures("private_datasets_cache")
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("strategy", ["sketch", "auto"])
def test_good_updates_outlive_bad_gradients_and_the_run_goes_on(
    tmp_path: Path, strategy: str
) -> None:
    class Bad(PolicyModule):
        good: Any = None

        def take_step(self) -> None:
            if self.global_step >= 2:
                self.good = self.good or runs.weights(self)
                sketches = getattr(self.trainer.strategy, "sketches", None)
                if sketches is not None:
                    sketches.flat.fill_(torch.nan)
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(torch.nan)
            super().take_step()

    def fitted(module: PolicyModule, steps: int, **options: Any) -> Trainer:
        saves = StepCheckpoint(dirpath=tmp_path / "saved")
        run = runs.trainer(
            tmp_path,
            steps,
            strategy=SketchStrategy(rank=32) if strategy == "sketch" else strategy,
            callbacks=[SketchAccumulation(), saves],
            enable_checkpointing=True,
        )
        run.fit(module, datamodule=runs.data(tmp_path), **options)
        return run

    module = runs.policy(kind=Bad, adamw=AdamWOptions(lr=1e-3))
    with pytest.raises((FloatingPointError, RuntimeError), match=r"not finite|non-finite"):
        fitted(module, 20)
    saved = torch.load(tmp_path / "saved" / "last.ckpt", weights_only=True)
    assert saved["global_step"] >= 2
    torch.testing.assert_close(saved["state_dict"], module.good, rtol=0, atol=0)
    again = runs.policy(adamw=AdamWOptions(lr=1e-3))
    steps = saved["global_step"] + 2
    path = str(tmp_path / "saved" / "last.ckpt")
    assert fitted(again, steps, ckpt_path=path).global_step == steps
    assert all(bool(weight.isfinite().all()) for weight in runs.weights(again).values())


def boring_trainer(folder: Path, steps: int, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "callbacks": list(callbacks),
        "max_steps": steps,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**defaults | options)


def test_a_metric_with_a_slash_makes_no_folder_and_last_finds_the_file(tmp_path: Path) -> None:
    class Logs(BoringModel):
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("eval/pass@1", 0.5)

    name = "{step}-{eval/pass@1:.3f}"
    options = {"filename": name, "every_n_train_steps": 2, "save_last": False, "save_top_k": -1}
    saves = StepCheckpoint(dirpath=tmp_path, **options)
    boring_trainer(tmp_path, 4, saves).fit(Logs())
    names = ["step=2-eval-pass@1=0.500.ckpt", "step=4-eval-pass@1=0.500.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    again = StepCheckpoint(dirpath=tmp_path, **options)
    assert newest(again._find_last_checkpoints(boring_trainer(tmp_path, 6, again))).endswith(
        names[1]
    )


def test_a_development_run_saves_nothing(tmp_path: Path) -> None:
    saves = StepCheckpoint(every_n_train_steps=1)
    boring_trainer(tmp_path, 2, saves, fast_dev_run=2).fit(BoringModel())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "half_done", "ranks", "saved"),
    [
        (RuntimeError(), False, 1, True),
        (KeyboardInterrupt(), False, 1, True),
        (KeyboardInterrupt(), True, 1, False),
        (FloatingPointError(), False, 1, True),
        (CheckpointNotWrittenError(), False, 1, False),
        (RuntimeError(), False, 2, False),
        (PreemptedError(), False, 2, True),
    ],
)
def test_a_broken_state_is_not_saved_over_the_last_good_one(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, half_done: bool, ranks: int, saved: bool
) -> None:
    calls = []
    monkeypatch.setattr(ModelCheckpoint, "on_exception", lambda *_: calls.append(1))
    trainer: Any = SimpleNamespace(
        optimizers=[SimpleNamespace(is_committing=half_done, state={})], world_size=ranks
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saves = StepCheckpoint()
        saves._has_begun = True
        saves.on_exception(trainer, LightningModule(), error)
    assert bool(calls) == saved
    assert len(caught) == (not saved)


def run(
    tmp_path: Path, steps: int, ckpt_path: str | None = None, version: str | None = None
) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepCheckpoint(every_n_train_steps=1)],
        max_steps=steps,
        limit_val_batches=0,
        logger=CSVLogger(tmp_path, "runs", version),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint:UserWarning")
def test_last_is_found_where_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        run(tmp_path, 1, "last")
    run(tmp_path, 3)
    again = run(tmp_path, 5, "last")
    assert Path(again.ckpt_path).parts[-3:] == ("version_1", "checkpoints", "last.ckpt")
    assert again.global_step == 5
    assert isinstance(again.strategy.checkpoint_io, AtomicCheckpointIO)


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint:UserWarning")
def test_last_is_the_newest_one_when_a_kill_came_before_it_was_renewed(tmp_path: Path) -> None:
    run(tmp_path, 2)
    saved = tmp_path / "runs" / "version_0" / "checkpoints"
    older = (saved / "last.ckpt").read_bytes()
    (saved / "last.ckpt").unlink()
    assert Path(run(tmp_path, 3, "last").ckpt_path).name == "step=2.ckpt"
    (tmp_path / "runs" / "version_1" / "checkpoints" / "last.ckpt").write_bytes(older)
    os.utime(tmp_path / "runs" / "version_1" / "checkpoints" / "last.ckpt", (1, 1))
    assert Path(run(tmp_path, 4, "last").ckpt_path).name == "step=3.ckpt"


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_last_of_a_run_with_a_name_is_not_that_of_another(tmp_path: Path) -> None:
    run(tmp_path, 2, version="one")
    assert run(tmp_path, 1, "last", version="two").ckpt_path is None
    assert run(tmp_path, 3, "last", version="one").global_step == 3


def test_a_resume_that_is_refused_saves_nothing(tmp_path: Path) -> None:
    """Its checkpoint would have a fresh optimizer, and be the newest."""

    class Other(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1)) for _ in range(3)])

    boring_trainer(tmp_path, 2, StepCheckpoint(dirpath=tmp_path / "first")).fit(BoringModel())
    saved = tmp_path / "first" / "last.ckpt"
    again = boring_trainer(tmp_path, 4, StepCheckpoint(dirpath=tmp_path / "second"))
    with pytest.raises(ValueError, match="parameter group"):
        again.fit(Other(), ckpt_path=saved)
    assert again.global_step == 2  # it would have been saved as a state of this step
    assert not list(tmp_path.glob("second/*"))
