"""A checkpoint of any strategy goes on under any other, with another number of processes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from logra_lightning.policy.export import export_checkpoint
from tests.runs import weights
from tests.split_runs import build, own_folder, run
from tests.two_processes import TwoProcesses

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]

PRECISIONS = ("32-true", "bf16-true")
PROCESSES = {"sketch": 1, "sketch_ddp": 2, "sketch_fsdp": 2}
PAIRS = list(permutations(PROCESSES, 2))


def fit(
    folder: Path, policy: str, strategy: str, precision: str, steps: int, ckpt: Path | None = None
) -> Any:
    module = build(model=policy)
    module.engine.calls = steps - 3 if ckpt else 0  # type: ignore[attr-defined]
    options: dict[str, Any] = {"precision": precision, "ckpt_path": ckpt, "strategy": strategy}
    made = run(own_folder(folder), PROCESSES[strategy], module, steps=steps, **options)
    return module, made


def start(folder: Path, policy: str, strategies: list[str]) -> None:
    """Three steps and a checkpoint in each precision."""
    for strategy in strategies:
        for precision in PRECISIONS:
            _, made = fit(folder, policy, strategy, precision, 3)
            made.save_checkpoint(folder / f"{strategy} {precision}.ckpt")


def go_on(folder: Path, policy: str, strategies: list[str]) -> None:
    """Three more steps after each other strategy's three; keeps what there is at the end."""
    for first, second in PAIRS:
        for precision in PRECISIONS if second in strategies else ():
            ckpt = folder / f"{first} {precision}.ckpt"
            module, made = fit(folder, policy, second, precision, 6, ckpt)
            found = weights(module), made.optimizers[0].state_dict(), made.global_step
            if made.is_global_zero:
                torch.save(found, folder / f"{first} {second} {precision}.pt")


@pytest.fixture(scope="module")
def resumed(
    two_processes: TwoProcesses, uneven_policy: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    alone, together = ["sketch"], ["sketch_ddp", "sketch_fsdp"]
    for work in (start, go_on):
        work(folder, uneven_policy, alone)
        two_processes.run(work, folder, uneven_policy, together)
    return folder


@pytest.fixture(scope="module")
def straight(resumed: Path, uneven_policy: str) -> dict[str, tuple[dict, dict]]:
    """Six steps of one process."""
    found = {}
    for precision in PRECISIONS:
        module, made = fit(resumed, uneven_policy, "sketch", precision, 6)
        found[precision] = weights(module), made.optimizers[0].state_dict()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_six_steps_are_three_and_three_under_another_strategy(
    resumed: Path,
    straight: dict[str, tuple[dict, dict]],
    first: str,
    second: str,
    precision: str,
) -> None:
    expected = straight[precision]
    found = torch.load(resumed / f"{first} {second} {precision}.pt", weights_only=False)
    assert found[2] == 6
    close = {"32-true": (1e-4, 1e-5), "bf16-true": (2e-2, 2e-3)}[precision]
    torch.testing.assert_close(found[0], expected[0], rtol=close[0], atol=close[1])
    states, own = found[1]["state"], expected[1]["state"]
    assert states.keys() == own.keys()
    for name, state in own.items():
        assert {k: (v.shape, v.dtype) for k, v in states[name].items()} == {
            k: (v.shape, v.dtype) for k, v in state.items()
        }
        assert states[name]["step"] == state["step"] == 6
        if "row_moment" in state:
            torch.testing.assert_close(
                states[name]["row_moment"],
                state["row_moment"],
                rtol={"32-true": 1e-3, "bf16-true": 0.2}[precision],
                atol=1e-2 * state["row_moment"].abs().max().item(),
            )


@pytest.mark.parametrize("strategy", PROCESSES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_of_any_strategy_is_exported(
    resumed: Path, tmp_path: Path, strategy: str, precision: str
) -> None:
    path = resumed / f"{strategy} {precision}.ckpt"
    export_checkpoint(str(path), str(tmp_path / "hf"))
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    saved = torch.load(path, weights_only=True)["state_dict"]
    for name, value in opened.state_dict().items():
        assert value.dtype == saved[f"policy.{name}"].dtype
        assert torch.equal(value, saved[f"policy.{name}"]), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpoints_of_all_strategies_have_the_same_names_shapes_and_dtypes(
    resumed: Path, precision: str
) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(v) for key, v in value.items()}
        return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)

    kinds = []
    for strategy in PROCESSES:
        saved = torch.load(resumed / f"{strategy} {precision}.ckpt", weights_only=True)
        optimizer = saved["optimizer_states"][0]
        kinds.append((shape(saved["state_dict"]), shape(optimizer["state"])))
        assert optimizer["sketch"]["rank"] == 32
    assert kinds[0] == kinds[1] == kinds[2]
