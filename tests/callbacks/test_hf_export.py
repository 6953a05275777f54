"""HFExport leaves the trained policy in a folder, also of shared-out weights, or says so early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from logra_lightning import SketchAccumulation
from logra_lightning.callbacks import HFExport, StepCheckpoint, hf_export
from logra_lightning.distributed.processes import process_index
from logra_lightning.policy.export import export_checkpoint
from tests.conftest import TINY_POLICY, make_llama
from tests.runs import data, fit, policy, trainer, weights
from tests.split_runs import build, own_folder, run
from tests.two_processes import TwoProcesses

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def exported(tmp_path: Path, module: Any, callback: HFExport, **options: Any) -> Any:
    return fit(tmp_path, module, callbacks=[SketchAccumulation(), callback], **options)


def assert_same_files(folder: Path, other: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in other.iterdir())
    assert "model.safetensors" in files
    for name in files:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_folder_is_that_of_the_exported_checkpoint(
    tmp_path: Path, precision: str, dtype: Any
) -> None:
    module, callback = policy(), HFExport(str(tmp_path / "hf"), dtype)
    run = exported(tmp_path, module, callback, precision=precision)
    run.save_checkpoint(tmp_path / "run.ckpt")
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "other"), dtype=dtype)
    assert_same_files(tmp_path / "hf", tmp_path / "other")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == (
        torch.float32 if (precision, dtype) == ("32-true", "auto") else torch.bfloat16
    )
    for name, weight in module.policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(loaded.dtype)), name


def test_it_lies_in_the_log_folder_unless_named(tmp_path: Path) -> None:
    callback = HFExport()
    logger = CSVLogger(tmp_path, name="run")
    exported(tmp_path, policy(), callback, logger=logger, steps=1)
    folder = tmp_path / "run" / "version_0" / "hf"
    assert (folder / "model.safetensors").is_file()
    assert (
        callback.summary() == f"Hugging Face folder: {folder} (1,191,936 bytes of weights, float32)"
    )


class Own(LightningModule):
    """A user's module in automatic optimization."""

    def __init__(self, policy: Any, tokenizer: Any) -> None:
        super().__init__()
        self.policy, self.tokenizer = policy.train(), tokenizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = torch.arange(3, 15)[None]
        return self.policy(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(2, 4))


def fit_own(tmp_path: Path, module: LightningModule, callback: HFExport, **options: Any) -> None:
    defaults = {"strategy": "auto", "callbacks": [callback]}
    trainer(tmp_path, 1, **(defaults | options)).fit(module)


def test_a_module_of_ones_own_is_exported(tmp_path: Path) -> None:
    llama = make_llama()
    before = llama.lm_head.weight.clone()
    fit_own(tmp_path, Own(llama, AutoTokenizer.from_pretrained(TINY_POLICY)), HFExport())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(loaded.lm_head.weight, llama.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, before)


class Renamed(LlamaForCausalLM):
    """A model with a weight that its config knows nothing of."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            BoringModel(),
            "HFExport needs BoringModel.policy to be a model of transformers, got None",
        ),
        (Own(nn.Linear(2, 2), None), "HFExport needs Own.policy to be .* got Linear"),
        (Own(make_llama(), None), "HFExport needs Own.tokenizer to be .* got NoneType"),
        (
            Own(Renamed(make_llama().config), AutoTokenizer.from_pretrained(TINY_POLICY)),
            "not those of a LlamaForCausalLM: unexpected 'value_head.bias', 'value_head.weight'",
        ),
    ],
)
def test_what_cannot_be_exported_is_told_before_training(
    tmp_path: Path, module: LightningModule, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_own(tmp_path, module, HFExport())
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_cannot_be_made_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    for name, message in (
        ("mine", "HFExport: there is something in output_dir"),
        ("mine/hf", "HFExport: output_dir '.*' cannot be written: Not a directory"),
    ):
        module = policy()
        with pytest.raises(ValueError, match=message):
            exported(tmp_path, module, HFExport(str(tmp_path / name)))
        assert module.policy is None


def test_a_full_disk_costs_the_folder_and_not_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("logra_lightning.policy.hf_folder.save_file", fail)
    keep = StepCheckpoint(dirpath=tmp_path, save_on_exception=False)
    with pytest.raises(RuntimeError, match="HFExport: .*No space left on device; .* MB are free"):
        fit(
            tmp_path,
            policy(),
            callbacks=[SketchAccumulation(), keep, HFExport()],
            enable_checkpointing=True,
        )
    monkeypatch.undo()
    assert not list(tmp_path.glob("*hf*"))
    export_checkpoint(str(tmp_path / "last.ckpt"), str(tmp_path / "hf"))


def test_a_run_with_nothing_left_to_train_says_so(tmp_path: Path) -> None:
    run = fit(tmp_path, policy())
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = trainer(tmp_path, callbacks=[SketchAccumulation(), HFExport()])
    with pytest.warns(UserWarning, match="HFExport wrote nothing, because there was nothing left"):
        again.fit(policy(), datamodule=data(tmp_path), ckpt_path=tmp_path / "run.ckpt")
    assert not (tmp_path / "hf").exists()


def test_an_unknown_dtype_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="one of auto, float32, bfloat16, got 'fp16'"):
        HFExport(dtype="fp16")  # type: ignore[arg-type]


def test_a_dev_run_and_an_interrupted_one_write_nothing(tmp_path: Path) -> None:
    class Failing(Own):
        def training_step(self, *_: Any) -> Tensor:
            raise FloatingPointError

    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    fit_own(tmp_path, Own(make_llama(), tokenizer), HFExport(), fast_dev_run=True)
    with pytest.raises(FloatingPointError):
        fit_own(tmp_path, Failing(make_llama(), tokenizer), HFExport())
    assert not list(tmp_path.glob("*hf*"))


def export(folder: Path, model: str, strategy: str, **options: Any) -> dict[str, Tensor]:
    """In both processes: the weights of a run that exported them and saved a checkpoint."""
    module, callback = build(model=model), HFExport(str(folder / "hf"))
    options["strategy"] = strategy
    made = run(own_folder(folder), 2, module, steps=2, more=[callback], **options)
    made.save_checkpoint(folder / "run.ckpt")
    return weights(module)


def export_bf16(folder: Path, model: str) -> dict[str, Tensor]:
    return export(folder, model, "sketch_fsdp", precision="bf16-true")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp_uneven"])
def test_two_processes_export_the_whole_policy_both_ways(
    two_processes: TwoProcesses, tmp_path: Path, uneven_policy: str, name: str
) -> None:
    if name == "fsdp_uneven":
        trained, _ = two_processes.run(export_bf16, tmp_path, uneven_policy)
    else:
        trained, _ = two_processes.run(export, tmp_path, str(TINY_POLICY), f"sketch_{name}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == (torch.bfloat16 if name == "fsdp_uneven" else torch.float32)
    assert {f"policy.{key}" for key in loaded.state_dict()} == trained.keys()
    for key, weight in loaded.state_dict().items():
        assert torch.equal(trained[f"policy.{key}"], weight), key
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "other"))
    assert_same_files(tmp_path / "hf", tmp_path / "other")


def stop_in_both(folder: Path) -> None:
    """Only the first process sees the trouble."""
    (folder / "hf").mkdir(exist_ok=True)
    (folder / "hf" / "mine").touch()
    with pytest.raises(ValueError, match="there is something in output_dir"):
        export(folder, str(TINY_POLICY), "sketch_fsdp")

    def fail(*args: Any, **_: Any) -> None:
        next(args[2])
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if process_index() == 0:
            patch.setattr(hf_export, "write_folder", fail)
        with pytest.raises(RuntimeError, match="No space left on device"):
            export(folder / "full", str(TINY_POLICY), "sketch_fsdp")


@pytest.mark.dist
@pytest.mark.slow
def test_both_processes_stop_whichever_of_them_sees_the_trouble(
    two_processes: TwoProcesses, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    two_processes.run(stop_in_both, tmp_path)
