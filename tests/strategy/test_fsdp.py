"""Two processes that share out the weights make the steps of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from logra_lightning import SketchAccumulation
from logra_lightning.objective import K3, ObjectiveOptions, ReinforcePlusPlus
from logra_lightning.policy import MemoryOptions
from logra_lightning.sketch.projection import projection_key, rademacher
from tests.runs import weights
from tests.split_runs import FirstSketches, build, logged_by, own_folder, resume_exactly, run
from tests.two_processes import TwoProcesses

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


def options_of(name: str, uneven_policy: str) -> dict[str, Any]:
    options = CASES[name]
    return options | {"model": uneven_policy} if "model" in options else options


def train(folder: Path, name: str, uneven_policy: str) -> tuple[dict, dict, list, float]:
    """In both: weights, logged values, rows of the last batch, largest part held of a weight."""
    module = build(**options_of(name, uneven_policy))
    made = run(own_folder(folder), 2, module, strategy="sketch_fsdp")
    assert module.rollouts is not None
    assert module.policy is not None
    held = max(p.to_local().numel() / p.numel() for p in module.policy.parameters())
    return weights(module), logged_by(made), list(module.rollouts.rows), held


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_one_process(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str, name: str
) -> None:
    both = two_processes.run(train, tmp_path, name, uneven_policy)
    (first, logged, rows, held), (second, _, other_rows, _) = both
    module = build(**options_of(name, uneven_policy))
    made = run(tmp_path, 1, module)
    assert held < 0.6
    assert module.rollouts is not None
    assert rows + other_rows == list(module.rollouts.rows)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    torch.testing.assert_close(first, weights(module), rtol=1e-4, atol=1e-5)
    expected = logged_by(made)
    for key in expected.keys() - {"optim/step_scale"}:
        assert logged[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-true"]
)
def test_a_run_resumes_exactly(two_processes: TwoProcesses, tmp_path: Path, precision: str) -> None:
    two_processes.run(resume_exactly, tmp_path, "sketch_fsdp", precision)


class FirstGradients(Callback):
    """Keeps the first step's dense gradients."""

    grads: dict[str, torch.Tensor] | None = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.grads is None:
            self.grads = {
                n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
            }


def first_sketches(folder: Path, uneven_policy: str) -> torch.Tensor:
    module, first = build(**options_of("uneven", uneven_policy)), FirstSketches()
    run(own_folder(folder), 2, module, steps=1, strategy="sketch_fsdp", more=[first])
    assert first.flat is not None
    return first.flat


def test_sketches_are_the_whole_batchs_dense_gradient_times_the_projection(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str
) -> None:
    module = build(**options_of("uneven", uneven_policy), max_grad_norm=None)
    dense = FirstGradients()
    run(tmp_path, 1, module, steps=1, strategy="auto", more=[dense])
    assert dense.grads is not None
    expected = []
    for name, gradient in dense.grads.items():
        name = name.removesuffix(".weight")
        if name.endswith("_proj"):
            key = projection_key(0, 0, name)
            signs = rademacher(key, 32, gradient.shape[1], device=torch.device("cpu"))
            expected.append((gradient @ signs.float().t()).reshape(-1))
    for flat in two_processes.run(first_sketches, tmp_path, uneven_policy):
        torch.testing.assert_close(flat, torch.cat(expected), rtol=1e-4, atol=1e-6)


class CountGathers(Callback):
    """Counts, in the last step, gathers of both ends and of a layer, and microbatches."""

    def __init__(self, gathered: list[str]) -> None:
        self.gathered = gathered
        self.found = (0, 0, 0)

    def on_train_batch_start(self, *_: Any) -> None:
        self.gathered.clear()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        ends = sum("lm_head" in name or "embed" in name for name in self.gathered)
        layer = sum("layers.1.mlp.up_proj" in name for name in self.gathered)
        self.found = (ends, layer, len(list(module.pack(module.rollouts))))


def count_gathers(folder: Path, name: str, uneven_policy: str) -> tuple[int, int, int]:
    module, gathered = build(**options_of(name, uneven_policy)), list[str]()
    count, original = CountGathers(gathered), _fsdp_param_group.foreach_all_gather

    def counted(params: Any, *args: Any, **options: Any) -> Any:
        gathered.extend(param._param_fqn for param in params)
        return original(params, *args, **options)

    callbacks = [SketchAccumulation(), count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
        run(own_folder(folder), 2, module, steps=2, strategy="sketch_fsdp", callbacks=callbacks)
    return count.found


def test_the_head_is_gathered_once_for_all_chunks_of_a_microbatch(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str
) -> None:
    for found in two_processes.run(count_gathers, tmp_path, "frozen others", uneven_policy):
        ends, layer, microbatches = found
        assert microbatches > 1
        assert layer == 2 * microbatches  # forward and backward
        assert ends == 2 * microbatches  # embedding and head, each in forward alone
    for found in two_processes.run(count_gathers, tmp_path, "tied", uneven_policy):
        ends, _, microbatches = found
        # One group: for the embedding, for the head, and for the embedding's gradient.
        assert ends == 3 * microbatches
