"""Two ranks that share out the weights make the steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from logra_lightning.objective import K3, ObjectiveOptions, ReinforcePlusPlus
from logra_lightning.policy import MemoryOptions
from logra_lightning.sketch.projection import projection_key, rademacher
from tests.ranks_run import build, run, run_script
from tests.runs import weights

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "uneven": {"model": "uneven"},
    "frozen others": {"train_others": False, "model": "uneven"},
    "batch-normalized": {"objective": ObjectiveOptions(ReinforcePlusPlus())},
    "masked": {"objective": ObjectiveOptions(mask_truncated=True)},
    "checkpointed": {"memory": MemoryOptions(80, activation_checkpointing=True), "model": "uneven"},
    "reference": {
        "objective": ObjectiveOptions(reference_kl=K3(0.1)),
        "train_others": False,
    },
    "unequal microbatches": {
        "objective": ObjectiveOptions(reference_kl=K3(0.1)),
        "memory": MemoryOptions(32),
    },
}

SCRIPT = """
from pathlib import Path
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from lightning.pytorch import Callback
from logra_lightning import SketchAccumulation
from tests.ranks_run import FirstSketches, assert_resumes_exactly, build, own_folder, run
from tests.runs import weights
from tests.strategy.test_fsdp import options_of, CASES

gathered = []
original = groups.foreach_all_gather

def counted(params, *args, **kwargs):
    gathered.extend(p._param_fqn for p in params)
    return original(params, *args, **kwargs)

class Count(Callback):
    def on_train_batch_start(self, *_):
        gathered.clear()

    def on_train_batch_end(self, trainer, module, *_):
        ends = sum("lm_head" in n or "embed" in n for n in gathered)
        layer = sum("layers.1.mlp.up_proj" in n for n in gathered)
        self.found = (ends, layer, len(list(module.pack(module.rollouts))))

if __name__ == "__main__":
    folder = Path({folder!r})
    rank, mine = own_folder(folder)
    for name in CASES:
        module, first = build(**options_of(name, folder)), FirstSketches()
        made = run(mine, 2, module, strategy="sketch_fsdp", more=[first])
        logged = {{k: float(v) for k, v in made.callback_metrics.items()}}
        held = max(p.to_local().numel() / p.numel() for p in module.policy.parameters())
        found = (weights(module), logged, module.rollouts.rows, first.flat, held)
        torch.save(found, folder / f"{{name}}_{{rank}}.pt")
    for precision in ("32-true", "bf16-true"):
        assert_resumes_exactly(folder, "sketch_fsdp", precision)
    groups.foreach_all_gather = counted
    for name in ("tied", "frozen others"):
        module, count = build(**options_of(name, folder)), Count()
        run(mine, 2, module, steps=2, strategy="sketch_fsdp",
            callbacks=[SketchAccumulation(), count])
        torch.save(count.found, folder / f"gathered {{name}}_{{rank}}.pt")
    print(f"rank {{rank}} done")
"""


def options_of(name: str, folder: Path) -> dict[str, Any]:
    options = CASES[name]
    return options | {"model": str(folder / "uneven")} if "model" in options else options


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_script(SCRIPT, tmp_path_factory.mktemp("ranks"))


def load(folder: Path, name: str, rank: int) -> tuple[dict, dict, list, torch.Tensor, float]:
    return torch.load(folder / f"{name}_{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_one_process(
    ranks: Path, tmp_path: Path, name: str
) -> None:
    module = build(**options_of(name, ranks))
    made = run(tmp_path, 1, module)
    first, logged, rows, _, held = load(ranks, name, 0)
    second, _, other_rows, _, _ = load(ranks, name, 1)
    assert held < 0.6  # of every weight
    assert module.rollouts is not None
    assert [*rows, *other_rows] == list(module.rollouts.rows)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    torch.testing.assert_close(first, weights(module), rtol=1e-4, atol=1e-5)
    expected = {k: float(v) for k, v in made.callback_metrics.items()}
    for key in expected.keys() - {"optim/step_scale"}:
        if not key.startswith("time/"):
            assert logged[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


class FirstGradients(Callback):
    """Keeps the first step's dense gradients."""

    grads: dict[str, torch.Tensor] | None = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.grads is None:
            self.grads = {
                n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
            }


def test_sketches_are_the_whole_batchs_dense_gradient_times_the_projection(
    ranks: Path, tmp_path: Path
) -> None:
    module, dense = build(**options_of("uneven", ranks), max_grad_norm=None), FirstGradients()
    run(tmp_path, 1, module, steps=1, strategy="auto", more=[dense])
    assert dense.grads is not None
    expected = []
    for name, gradient in dense.grads.items():
        name = name.removesuffix(".weight")
        if name.endswith("_proj"):
            key = projection_key(0, 0, name)
            signs = rademacher(key, 32, gradient.shape[1], device=torch.device("cpu"))
            expected.append((gradient @ signs.float().t()).reshape(-1))
    for rank in (0, 1):
        flat = load(ranks, "uneven", rank)[3]
        torch.testing.assert_close(flat, torch.cat(expected), rtol=1e-4, atol=1e-6)


def test_the_head_is_gathered_once_for_all_chunks_of_a_microbatch(ranks: Path) -> None:
    for rank in (0, 1):
        ends, layer, microbatches = torch.load(ranks / f"gathered frozen others_{rank}.pt")
        assert microbatches > 1
        assert layer == 2 * microbatches  # forward and backward
        assert ends == 2 * microbatches  # embedding and head, each in forward alone
        ends, _, microbatches = torch.load(ranks / f"gathered tied_{rank}.pt")
        # One group: for the embedding, for the head, and for the embedding's gradient.
        assert ends == 3 * microbatches
