"""Two ranks make the steps of one process, whatever share of the work each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from logra_lightning.objective import ObjectiveOptions, ReinforcePlusPlus
from tests.ranks_run import build, run
from tests.runs import run_ranks, weights

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen others": {"train_others": False},
    "batch-normalized": {"objective": ObjectiveOptions(ReinforcePlusPlus())},
    "minibatches": {"minibatches": 2},
    "masked": {"objective": ObjectiveOptions(mask_truncated=True)},
}

SCRIPT = """
from pathlib import Path
import torch
from tests.ranks_run import assert_resumes_exactly, build, own_folder, run
from tests.runs import weights
from tests.strategy.test_ddp import CASES

if __name__ == "__main__":
    folder = Path({folder!r})
    rank, mine = own_folder(folder)
    for name, options in CASES.items():
        module = build(**options)
        made = run(mine, 2, module, steps=4 if "minibatches" in options else 3)
        logged = {{k: float(v) for k, v in made.callback_metrics.items()}}
        found = (weights(module), logged, module.rollouts.rows)
        torch.save(found, folder / f"{{name}}_{{rank}}.pt")
    for precision in ("32-true", "bf16-true"):
        assert_resumes_exactly(folder, "sketch_ddp", precision)
    other = build()
    try:
        from logra_lightning import SketchDDPStrategy
        run(mine, 2, other, strategy=SketchDDPStrategy(rank=32, projection_seed=rank))
    except RuntimeError as error:
        assert "processes hold different projections" in str(error), error
    else:
        raise AssertionError("different projections were not noticed")
    print(f"rank {{rank}} done")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT.format(folder=str(folder)), folder)
    return folder


def load(folder: Path, name: str, rank: int) -> tuple[dict, dict, list]:
    return torch.load(folder / f"{name}_{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_one_process(
    ranks: Path, tmp_path: Path, name: str
) -> None:
    module = build(**CASES[name])
    made = run(tmp_path, 1, module, steps=4 if name == "minibatches" else 3)
    (first, logged, rows), (second, _, other_rows) = (load(ranks, name, r) for r in (0, 1))
    assert module.rollouts is not None
    assert [*rows, *other_rows] == list(module.rollouts.rows)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key  # ranks agree bit for bit
    if name != "minibatches":  # whose shares are drawn by each rank
        torch.testing.assert_close(first, weights(module), rtol=1e-4, atol=1e-5)
        expected = {k: float(v) for k, v in made.callback_metrics.items()}
        for key in expected.keys() - {"optim/step_scale"}:
            if not key.startswith("time/"):
                assert logged[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
