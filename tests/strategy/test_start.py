"""Process 0 alone reads the weights, and every process gets those of a plain load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from logra_lightning.distributed.processes import process_index
from logra_lightning.distributed.sharding import is_sharded, local, whole
from logra_lightning.objective import K3, ObjectiveOptions
from logra_lightning.policy.load import exact_buffers, load_policy
from logra_lightning.strategy import SketchFSDPStrategy
from logra_lightning.tokenizer import load_tokenizer
from tests.conftest import TINY_POLICY
from tests.runs import data, policy, weights
from tests.split_runs import build, own_folder, run
from tests.two_processes import TwoProcesses

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("private_datasets_cache")]

OWN_CODE = """
import torch
from transformers import LlamaForCausalLM


class OwnModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.arange(5), persistent=True)
"""


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("process 1 reads weights")


def set_up(folder: Path, module: Any, precision: str) -> Trainer:
    """A run of no steps, in which process 1 may not read weights."""
    with pytest.MonkeyPatch.context() as patch:
        if process_index() == 1:
            patch.setattr("transformers.modeling_utils.safe_open", refuse)
            patch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
        return run(
            own_folder(folder), 2, module, steps=0, strategy="sketch_fsdp", precision=precision
        )


def load_both_ways(folder: Path, path: str, precision: str, options: dict[str, Any]) -> bool:
    """Whether embedding and head are one; all else is asserted."""
    objective = ObjectiveOptions(reference_kl=K3(0.1))
    module = build(model=path, model_kwargs=options, objective=objective)
    set_up(folder, module, precision)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    plain: Any = load_policy(path, dtype=dtype, **options)
    with exact_buffers(plain):
        plain.to(dtype)
    found: Any = module.policy
    assert found.generation_config.to_json_string() == plain.generation_config.to_json_string()
    assert isinstance(found, type(plain))
    assert found.training
    params = dict(plain.named_parameters(remove_duplicate=False))
    own = dict(found.named_parameters(remove_duplicate=False))
    assert params.keys() == own.keys()
    for name, param in own.items():
        assert is_sharded(param)
        assert param.dtype == params[name].dtype
        assert torch.equal(whole(param), params[name]), name
    buffers = dict(plain.named_buffers())
    assert buffers.keys() == dict(found.named_buffers()).keys()
    for name, buffer in found.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    reference = module._reference
    assert reference is not None
    for name, start in reference._start.items():  # the rows of this process alone
        assert torch.equal(start, local(own[name])), name
    assert found.state_dict().keys() == plain.state_dict().keys()
    return own["lm_head.weight"] is own["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("tied", "bf16-true"), ("uneven", "32-true"), ("untied by its weights", "bf16-mixed")],
)
def test_weights_and_buffers_are_those_of_a_plain_load(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str, kind: str, precision: str
) -> None:
    path = uneven_policy if kind == "uneven" else str(TINY_POLICY)
    if kind == "untied by its weights":  # transformers unties where a file has two, and config lies
        config = LlamaConfig.from_pretrained(uneven_policy)
        model = LlamaForCausalLM.from_pretrained(uneven_policy)
        config.tie_word_embeddings = True
        path = str(tmp_path / "model")
        model.save_pretrained(path)
        config.save_pretrained(path)
        load_tokenizer(uneven_policy).save_pretrained(path)
    tied = two_processes.run(load_both_ways, tmp_path, path, precision, {})
    assert tied == [kind == "tied"] * 2


def test_a_model_with_code_and_buffers_of_its_own_is_the_same_too(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str
) -> None:
    folder = tmp_path / "model"
    model = LlamaForCausalLM.from_pretrained(uneven_policy)
    model.config.auto_map = {"AutoModelForCausalLM": "own_model.OwnModel"}
    weights_of = model.state_dict() | {"seen": torch.tensor([9, 8, 7, 6, 5])}
    model.save_pretrained(folder, state_dict=weights_of)
    model.config.save_pretrained(folder)
    load_tokenizer(uneven_policy).save_pretrained(folder)
    (folder / "own_model.py").write_text(OWN_CODE)
    options = {"trust_remote_code": True}
    two_processes.run(load_both_ways, tmp_path, str(folder), "32-true", options)


def fail(folder: Path, path: str) -> str:
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        run(own_folder(folder), 2, build(model=path), strategy="sketch_fsdp")
    return str(error.value)


def test_weights_that_are_not_there_end_all_processes_with_the_same_line(
    two_processes: TwoProcesses, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    load_tokenizer(str(TINY_POLICY)).save_pretrained(folder)
    LlamaConfig.from_pretrained(TINY_POLICY).save_pretrained(folder)
    first, second = two_processes.run(fail, tmp_path, str(folder), timeout=60)
    assert first == second
    assert "\n" not in first


def other_options(folder: Path) -> str:
    layers = {"num_hidden_layers": 1} if process_index() else {}
    module = build(model_kwargs=layers)
    with pytest.raises(ValueError, match="not the one that process 1 built") as error:
        run(own_folder(folder), 2, module, strategy="sketch_fsdp")
    return str(error.value)


def test_processes_with_other_models_are_told(two_processes: TwoProcesses, tmp_path: Path) -> None:
    first, second = two_processes.run(other_options, tmp_path)
    assert first == second
    assert "model.layers.1" in first


def validate(folder: Path) -> dict[str, torch.Tensor]:
    module = policy()
    made = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SketchFSDPStrategy(rank=8),
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        limit_val_batches=1,
        default_root_dir=own_folder(folder),
    )
    with pytest.MonkeyPatch.context() as patch:
        if process_index() == 1:
            patch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
        found = made.validate(module, datamodule=data(own_folder(folder)), verbose=False)
    assert "eval/reward" in found[0]
    return weights(module)


def test_validation_reads_once_too(two_processes: TwoProcesses, tmp_path: Path) -> None:
    plain = load_policy(str(TINY_POLICY)).state_dict()
    for found in two_processes.run(validate, tmp_path):
        for name, value in plain.items():
            assert torch.equal(found[f"policy.{name}"], value)
