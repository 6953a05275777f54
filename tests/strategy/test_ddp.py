"""Two processes make the steps of one, whatever share of the work each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from logra_lightning import SketchDDPStrategy
from logra_lightning.distributed.processes import process_index
from logra_lightning.objective import ObjectiveOptions, ReinforcePlusPlus
from tests.runs import weights
from tests.split_runs import build, logged_by, own_folder, resume_exactly, run
from tests.two_processes import TwoProcesses

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen others": {"train_others": False},
    "batch-normalized": {"objective": ObjectiveOptions(ReinforcePlusPlus())},
    "minibatches": {"minibatches": 2},
    "masked": {"objective": ObjectiveOptions(mask_truncated=True)},
}


def train(folder: Path, processes: int, name: str) -> tuple[dict, dict, list]:
    """Weights, logged values and rows of the last batch."""
    module = build(**CASES[name])
    steps = 4 if name == "minibatches" else 3
    made = run(own_folder(folder), processes, module, steps=steps)
    assert module.rollouts is not None
    return weights(module), logged_by(made), list(module.rollouts.rows)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_one_process(
    two_processes: TwoProcesses, tmp_path: Path, name: str
) -> None:
    (first, logged, rows), (second, _, other_rows) = two_processes.run(train, tmp_path, 2, name)
    alone, expected, all_rows = train(tmp_path, 1, name)
    assert rows + other_rows == all_rows
    for key, value in first.items():
        assert torch.equal(value, second[key]), key  # the processes agree bit for bit
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-5)
    for key in expected.keys() - {"optim/step_scale"}:
        assert logged[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-true"]
)
def test_a_run_resumes_exactly(two_processes: TwoProcesses, tmp_path: Path, precision: str) -> None:
    two_processes.run(resume_exactly, tmp_path, "sketch_ddp", precision)


def refuse_different_projections(folder: Path) -> None:
    strategy = SketchDDPStrategy(rank=32, projection_seed=process_index())
    with pytest.raises(RuntimeError, match="processes hold different projections"):
        run(own_folder(folder), 2, build(), strategy=strategy)


def test_different_projections_are_noticed(two_processes: TwoProcesses, tmp_path: Path) -> None:
    two_processes.run(refuse_different_projections, tmp_path)
