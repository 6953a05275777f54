"""What a library does to the process is undone, and a process group of the trainer survives."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch

from logra_lightning.engines.process_state import (
    default_group_kept,
    plain_torch,
    process_as_it_was,
    random_state_kept,
)


def test_random_states_survive_also_an_error() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    def disturb() -> None:
        with random_state_kept():
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            raise KeyError

    with pytest.raises(KeyError):
        disturb()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()  # type: ignore[index]


def test_environment_threads_and_warnings_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGRA_TEST_A", "1")
    monkeypatch.setenv("LOGRA_TEST_C", "3")
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    with process_as_it_was():
        os.environ["LOGRA_TEST_A"] = "2"
        os.environ["LOGRA_TEST_B"] = "2"
        del os.environ["LOGRA_TEST_C"]
        torch.set_num_threads(1)
        torch.set_num_threads = lambda n: None
        warnings.warn("not seen", stacklevel=1)
    assert os.environ["LOGRA_TEST_A"] == "1"
    assert "LOGRA_TEST_B" not in os.environ
    assert os.environ["LOGRA_TEST_C"] == "3"
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("keep", [True, False])
def test_the_trainers_group_survives_where_it_was_there_first(tmp_path: object, keep: bool) -> None:
    store = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    own = torch.distributed.new_group([0])
    destroy = torch.distributed.destroy_process_group
    with default_group_kept(keep):
        torch.distributed.destroy_process_group(own)
        torch.distributed.destroy_process_group()
    assert torch.distributed.destroy_process_group is destroy
    assert torch.distributed.is_initialized() == keep
    if keep:
        torch.distributed.destroy_process_group()


def test_the_precision_of_matrix_products_survives() -> None:
    with process_as_it_was():
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "highest"


def test_plain_torch_has_no_autocast_and_makes_float32() -> None:
    x = torch.ones(2, 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with plain_torch():
                assert (x @ x).dtype == torch.float32
                assert torch.zeros(1).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
            assert torch.zeros(1).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
