"""A model without weights becomes the one that process 0 has, weight by weight."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from logra_lightning.distributed import first_process
from logra_lightning.distributed.first_process import FirstProcessWeights
from logra_lightning.distributed.processes import process_index
from tests.two_processes import TwoProcesses

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


class Model(nn.Module):
    """Two layers of one weight, a frozen one in bf16, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.other = nn.Linear(2, 4, bias=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("seen", torch.tensor(7))


def loaded() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Model()
    model.second.weight = model.first.weight
    model.other.to(torch.bfloat16).requires_grad_(False)
    return model


def own_model() -> Model:
    """The loaded model in process 0; one without weights, tied or cast in process 1."""
    if process_index() == 0:
        return loaded()
    with torch.device("meta"):
        return Model()


def become_alike() -> None:
    model, expected = own_model(), loaded()
    weights = FirstProcessWeights(model, CPU)
    weights.check()
    weights.take_()
    assert all(p.is_meta for p in model.parameters())
    held_while_sending = Counter[str]()
    original = first_process.copy_from_first_process_

    def count(tensors: list[Tensor]) -> None:
        held_while_sending["weights"] = max(held_while_sending["weights"], len(weights._full))
        original(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_process, "copy_from_first_process_", count)
        weights.fill_()
    assert held_while_sending["weights"] == (2 if process_index() == 0 else 0)
    assert not weights._full
    assert model.second.weight is model.first.weight
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, param in expected.named_parameters():
        own = model.get_parameter(name)
        assert (own.dtype, own.requires_grad) == (param.dtype, param.requires_grad)
        assert torch.equal(own, param)
    for name, buffer in expected.named_buffers():
        assert model.get_buffer(name).dtype == buffer.dtype
        assert torch.equal(model.get_buffer(name), buffer)


def test_weights_ties_and_buffers_are_those_of_process_0(two_processes: TwoProcesses) -> None:
    two_processes.run(become_alike)


def differ() -> None:
    model = own_model()
    if process_index() == 1:
        model.other = nn.Linear(2, 9, bias=False, device="meta")
    weights = FirstProcessWeights(model, CPU)
    if process_index() == 0:
        weights.check()
        return
    with pytest.raises(ValueError, match="process 1 built .*out_features=4.* / .*out_features=9"):
        weights.check()


def test_a_layer_of_another_size_is_named(two_processes: TwoProcesses) -> None:
    two_processes.run(differ)
