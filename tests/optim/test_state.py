"""What a checkpoint holds is what goes on, and another run's is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from logra_lightning.optim import AdamWOptions, RelativeRowAdam, RowAdam
from logra_lightning.optim.state import go_on_with
from logra_lightning.sketch import SketchBank, find_targets
from tests.conftest import Pair
from tests.optim.sketches import CPU, RANK, random_sketches, setup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_equals_never_stopped(pair: Pair, dtype: torch.dtype) -> None:
    straight, resumed = pair.to(dtype), copy.deepcopy(pair.to(dtype))

    def steps(model: Pair, optimizer: RowAdam, which: range) -> None:
        for step in which:
            optimizer.sketches.begin_step(step)
            random_sketches(optimizer.sketches, step)
            model.o_proj.bias.grad = torch.full_like(model.o_proj.bias, step + 1.0)
            optimizer.step()

    first = RelativeRowAdam(straight.parameters(), setup(straight)[0], AdamWOptions(lr=1e-3))
    steps(straight, first, range(4))
    second = RelativeRowAdam(resumed.parameters(), setup(resumed)[0], AdamWOptions(lr=1e-3))
    steps(resumed, second, range(2))
    weights, state = copy.deepcopy(resumed.state_dict()), copy.deepcopy(second.state_dict())
    fresh = Pair().to(dtype)
    fresh.load_state_dict(weights)
    third = RelativeRowAdam(fresh.parameters(), setup(fresh)[0], AdamWOptions(lr=1e-3))
    third.load_state_dict(state)
    steps(fresh, third, range(2, 4))
    torch.testing.assert_close(fresh.state_dict(), straight.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(
        third.state_dict()["state"], first.state_dict()["state"], rtol=0, atol=0
    )


def test_a_checkpoint_of_other_sketches_or_another_optimizer_is_refused(pair: Pair) -> None:
    sketches, _ = setup(pair)
    optimizer = RelativeRowAdam(pair.parameters(), sketches)
    other = SketchBank(find_targets(pair, ["q_proj", "o_proj"]), RANK - 1, device=CPU)
    for saved in (
        RelativeRowAdam(pair.parameters(), other).state_dict(),
        RowAdam(pair.parameters(), sketches).state_dict(),
        torch.optim.AdamW(pair.parameters()).state_dict(),
    ):
        with pytest.raises(ValueError, match="resume with the same strategy, optimizer"):
            optimizer.load_state_dict(saved)


def test_a_checkpoint_of_other_weights_is_refused(pair: Pair) -> None:
    sketches, _ = setup(pair)
    all_train = RelativeRowAdam(pair.named_parameters(), sketches)
    pair.o_proj.bias.requires_grad_(False)
    fewer_train = RelativeRowAdam(pair.named_parameters(), sketches)
    with pytest.raises(ValueError, match=r"no optimizer state of 1 weights .* 'o_proj.bias'"):
        all_train.load_state_dict(fewer_train.state_dict())
    with pytest.raises(ValueError, match=r"of 1 weights that do not train now, .* 'o_proj.bias'"):
        fewer_train.load_state_dict(all_train.state_dict())


@pytest.mark.parametrize(
    ("now", "then", "goes_on_with"),
    [
        ({"lr": 1e-3}, {"lr": 1e-3}, 1e-3),
        ({"lr": 1e-3, "initial_lr": 1e-3}, {"lr": 5e-4, "initial_lr": 1e-3}, 5e-4),
        ({"lr": 4e-3, "initial_lr": 4e-3}, {"lr": 5e-4, "initial_lr": 1e-3}, 2e-3),
        ({"lr": 4e-3}, {"lr": 0.0, "initial_lr": 0.0}, 4e-3),
    ],
)
def test_a_learning_rate_goes_on_with_the_factor_of_its_scheduler(
    now: dict[str, Any], then: dict[str, Any], goes_on_with: float
) -> None:
    first, before = now.get("initial_lr", now["lr"]), then.get("initial_lr", then["lr"])
    changed = go_on_with(now, then | {"eps": 1e-8})
    assert now["lr"] == pytest.approx(goes_on_with)
    assert changed == ({} if first == before else {"lr": (before, first)})
