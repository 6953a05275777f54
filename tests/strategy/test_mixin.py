"""The strategy owns the sketches: what it refuses, and how steps follow each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

from logra_lightning import RelativeRowAdam, SketchAccumulation, SketchStrategy
from tests.conftest import make_pair


class Own(LightningModule):
    """A user's module: two microbatches a step, `steps_per_batch` steps a batch."""

    def __init__(self, steps_per_batch: int = 1, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.net = make_pair()
        self.steps_per_batch = steps_per_batch
        self.seen: list[tuple[int, int, torch.Tensor]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for _ in range(self.steps_per_batch):
            for part in batch.chunk(2):
                self.manual_backward(self.net(part).square().sum())
            sketches = self.trainer.strategy.sketches
            self.seen.append((sketches.step, sketches.draw, sketches.flat.clone()))
            self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return RelativeRowAdam(self.parameters(), self.trainer.strategy.sketches)

    def train_dataloader(self) -> DataLoader:
        rows = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=4)


def strategy(**options: Any) -> SketchStrategy:
    return SketchStrategy(**({"rank": 4, "targets": ["q_proj", "o_proj"]} | options))


def run(module: LightningModule, tmp_path: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": strategy(),
        "callbacks": [SketchAccumulation()],
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    trainer = Trainer(**(defaults | options))
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_each_step_has_its_own_sums_and_projection(tmp_path: Path, steps_per_batch: int) -> None:
    module = Own(steps_per_batch)
    trainer = run(module, tmp_path, callbacks=[SketchAccumulation(refresh_every=2)])
    steps = 3 * steps_per_batch
    assert trainer.global_step == steps
    assert [step for step, _, _ in module.seen] == list(range(steps))
    assert [draw for _, draw, _ in module.seen] == [step // 2 for step in range(steps)]
    norms = [flat.norm() for _, _, flat in module.seen]
    assert max(norms) < 2 * min(norms)  # sums do not pile up


def test_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    module = Own()
    trainer = run(module, tmp_path)
    assert trainer.strategy.sketches is None
    assert not module.net.q_proj._forward_hooks
    assert all(p.requires_grad for p in module.parameters())


def test_a_fit_that_failed_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    class Failing(Own):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            raise RuntimeError("stopped")

    module = Failing()
    with pytest.raises(RuntimeError, match="stopped"):
        run(module, tmp_path)
    assert not module.net.q_proj._forward_hooks
    assert all(p.requires_grad for p in module.parameters())


def test_without_the_callback_it_says_so_before_the_first_batch(tmp_path: Path) -> None:
    module = Own()
    with pytest.raises(RuntimeError, match="add the SketchAccumulation callback"):
        run(module, tmp_path, callbacks=[])
    assert module.seen == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 10}, r"between 1 and 9 \(in_features of 'net.o_proj'\), got 10"),
        ({"targets": ["qproj"]}, "this model has o_proj, q_proj"),
    ],
)
def test_rank_and_targets_that_do_not_fit_are_refused(
    tmp_path: Path, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(Own(), tmp_path, strategy=strategy(**options))


def test_two_optimizers_or_another_one_are_refused(tmp_path: Path) -> None:
    class Two(Own):
        def configure_optimizers(self) -> Any:
            return [super().configure_optimizers(), torch.optim.AdamW(self.parameters())]

    class Other(Own):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    for module, found in ((Two(), "RelativeRowAdam, AdamW"), (Other(), "AdamW")):
        with pytest.raises(ValueError, match=f"exactly one optimizer, .* returned {found}"):
            run(module, tmp_path)


def test_frozen_copies_are_not_sketched(tmp_path: Path) -> None:
    class WithReference(Own):
        def __init__(self) -> None:
            super().__init__()
            self.reference = make_pair().requires_grad_(False)
            self.names: list[str] = []

        def on_train_start(self) -> None:
            self.names = [layer.name for layer in self.trainer.strategy.sketches]

    module = WithReference()
    run(module, tmp_path)
    assert module.names == ["net.q_proj", "net.o_proj"]
    assert not any(p.requires_grad for p in module.reference.parameters())
    module.net.requires_grad_(False)
    with pytest.raises(ValueError, match="all weights called q_proj, o_proj are frozen"):
        run(module, tmp_path)


def test_automatic_optimization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set self.automatic_optimization = False in Own"):
        run(Own(automatic=True), tmp_path)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precision_without_support_is_refused(tmp_path: Path, precision: Any) -> None:
    with pytest.raises(ValueError, match=f"bf16-true, got {precision}"):
        run(Own(), tmp_path, precision=precision)


def test_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="trains on one device, got 2"):
        Trainer(accelerator="cpu", devices=2, strategy=strategy())


def test_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        SketchStrategy(rank=0)


def test_it_is_registered_by_name() -> None:
    assert "sketch" in StrategyRegistry
    trainer = Trainer(accelerator="cpu", devices=1, strategy="sketch", logger=False)
    assert isinstance(trainer.strategy, SketchStrategy)
    assert trainer.strategy.root_device == torch.device("cpu")


def test_names_of_the_state_dict_do_not_change(tmp_path: Path) -> None:
    module = Own()
    names = list(module.state_dict())
    run(module, tmp_path)
    assert list(module.state_dict()) == names
