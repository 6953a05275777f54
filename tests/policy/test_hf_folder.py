"""Folders hold what the model holds, appear whole or not at all, and cost the memory of a shard."""

from __future__ import annotations

import json
import os
import resource
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from logra_lightning.policy.hf_folder import Layout, check_output_dir, write_folder
from logra_lightning.policy.load import exact_buffers
from tests.conftest import TINY_POLICY, make_llama
from tests.warm import Warm

TOKENS = torch.arange(3, 15)[None]


def weights_of(policy: Any, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    state = policy.state_dict()
    return ((name, state[name]) for name in layout.shapes)


def write(folder: Path, policy: Any, **options: Any) -> Any:
    layout = Layout(policy.config)
    defaults: dict[str, Any] = {
        "weights": weights_of(policy, layout),
        "tokenizer": AutoTokenizer.from_pretrained(TINY_POLICY),
        "generation_config": policy.generation_config,
    }
    return write_folder(folder, layout, **(defaults | options))


def logits(policy: Any) -> Tensor:
    with torch.no_grad():
        return policy(TOKENS).logits


def cast(policy: Any, dtype: torch.dtype) -> Any:
    with exact_buffers(policy):
        return policy.to(dtype)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_is_the_one_that_transformers_saves(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    policy = cast(make_llama(tie_word_embeddings=tied), dtype)
    written = write(tmp_path / "ours", policy)
    policy.save_pretrained(tmp_path / "theirs")
    for name in files(tmp_path / "theirs"):
        ours, theirs = (tmp_path / whose / name for whose in ("ours", "theirs"))
        if name != "model.safetensors":
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded), logits(policy))
    assert written.nbytes == sum(p.nbytes for p in policy.parameters())  # a tied head counts once
    assert written.dtype == str(dtype).removeprefix("torch.")


def test_several_shards_equal_one(tmp_path: Path) -> None:
    policy = make_llama()
    write(tmp_path / "one", policy)
    write(tmp_path / "several", policy, max_shard_bytes=40_000)
    shards = sorted((tmp_path / "several").glob("*.safetensors"))
    assert [p.name for p in shards] == [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)]
    assert max(path.stat().st_size for path in shards) < 42_000
    one, several = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "several")
    )
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", None)])
def test_dtype_is_that_of_weights_and_config(
    tmp_path: Path, dtype: str, expected: torch.dtype | None
) -> None:
    policy = make_llama()
    written = write(tmp_path / "hf", policy, dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == (expected or torch.float32)
    assert written.dtype == dtype
    assert torch.equal(logits(loaded), logits(cast(policy, loaded.dtype)))


def test_weights_of_several_dtypes_are_read_without_rounding(tmp_path: Path) -> None:
    policy = make_llama().to(torch.bfloat16)
    policy.model.norm.float()
    policy.model.norm.weight.data += 1e-5
    assert write(tmp_path / "hf", policy).dtype == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, weight in policy.state_dict().items():
        assert torch.equal(loaded[name], weight.float()), name


def test_rows_of_one_storage_are_written_as_weights_of_their_own(tmp_path: Path) -> None:
    policy = make_llama()
    before = logits(policy)
    attention = policy.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    fused = torch.cat([part.weight.data for part in parts])  # as an engine shares them
    for part, rows in zip(parts, fused.split([len(p.weight) for p in parts]), strict=True):
        part.weight.data = rows
    write(tmp_path / "hf", policy)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), before)


MIXTURE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        # Experts are one weight in the model and one each in files.
        (
            "Qwen3MoeConfig",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 16,
                "moe_intermediate_size": 16,
            },
        ),
        ("MixtralConfig", {"num_local_experts": 4}),
        ("GPTNeoXConfig", {"num_key_value_heads": None}),  # the head is called otherwise in files
    ],
)
def test_names_in_files_are_those_that_transformers_saves(
    tmp_path: Path, config: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    options = {key: value for key, value in (MIXTURE | options).items() if value is not None}
    made = getattr(transformers, config)(**options)
    policy = AutoModelForCausalLM.from_config(made).eval()
    write(tmp_path / "ours", policy, max_shard_bytes=10_000)
    policy.save_pretrained(tmp_path / "theirs", max_shard_size=10_000)
    index = "model.safetensors.index.json"
    ours, theirs = (
        json.loads((tmp_path / whose / index).read_text())["weight_map"].keys()
        for whose in ("ours", "theirs")
    )
    assert ours == theirs != Layout(made).shapes.keys()
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), logits(policy)
    )


def test_a_model_whose_weights_are_stored_several_as_one_is_refused() -> None:
    with pytest.raises(ValueError, match="stores several weights of a HrmTextForCausalLM as one"):
        Layout(transformers.HrmTextConfig(num_hidden_layers=1))


def test_a_quantized_model_is_refused() -> None:
    config = make_llama().config
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="start from a model that is not quantized"):
        Layout(config)


def test_one_shard_is_alive_at_a_time(tmp_path: Path) -> None:
    policy = make_llama(num_hidden_layers=6)
    layout = Layout(policy.config)
    alive: list[tuple[weakref.ref[Tensor], int]] = []
    most = 0

    def copies() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, weight in weights_of(policy, layout):
            most = max(most, sum(size for ref, size in alive if ref() is not None))
            copy = weight.clone()
            alive.append((weakref.ref(copy), copy.nbytes))
            yield name, copy
            del copy

    written = write(tmp_path / "hf", policy, weights=copies(), max_shard_bytes=30_000)
    assert written.nbytes > 300_000
    assert 15_000 < most <= 30_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("lm_head.weight"), "missing 'lm_head.weight'"),
        (lambda state: state.update(extra=torch.ones(1)), "unexpected 'extra'"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(5)}),
            r"'model.norm.weight' has shape \[5\], not \[48\]",
        ),
    ],
)
def test_other_weights_than_the_configs_are_told_before_anything_is_written(
    llama: LlamaForCausalLM, change: Any, message: str
) -> None:
    state = llama.state_dict()
    change(state)
    with pytest.raises(ValueError, match=f"not those of a LlamaForCausalLM: {message}"):
        Layout(llama.config).check(state)


def test_a_folder_that_would_not_open_is_not_left(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    weights = list(weights_of(llama, Layout(llama.config)))[:-1]
    with pytest.raises(RuntimeError, match="missing 'lm_head.weight'"):
        write(tmp_path / "hf", llama, weights=weights)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_a_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ValueError, match=f"there is something in output_dir '.*/{name}'"):
            check_output_dir(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        check_output_dir(tmp_path / "file" / "hf")
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.path.ismount", lambda path: Path(path).name == "disk")
        with pytest.raises(ValueError, match="is where a disk is mounted: name a folder in it"):
            check_output_dir(tmp_path / "disk")
        assert check_output_dir(tmp_path / "disk" / "hf") == tmp_path / "disk" / "hf"
    monkeypatch.chdir(tmp_path)
    assert check_output_dir("new/hf") == tmp_path / "new" / "hf"
    assert files(tmp_path / "new") == []
    assert files(tmp_path / "full") == ["mine"]


def test_an_unknown_dtype_is_told(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="one of auto, float32, bfloat16, got 'fp16'"):
        write(tmp_path / "hf", llama, dtype="fp16")
    assert files(tmp_path) == []


def test_an_empty_folder_is_filled(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    (tmp_path / "hf").mkdir()
    assert write(tmp_path / "hf", llama).folder == tmp_path / "hf"
    assert files(tmp_path) == ["hf"]


def export_until_killed(path: Path) -> None:
    policy = make_llama()

    def until_killed() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights_of(policy, Layout(policy.config))):
            if number == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    write(path, policy, weights=until_killed(), max_shard_bytes=20_000)


@pytest.mark.faults
def test_a_killed_export_leaves_nothing_that_looks_whole(warm: Warm, tmp_path: Path) -> None:
    output = tmp_path.parent / "output.txt"
    run = warm.begin(export_until_killed, tmp_path / "hf", output=output)
    assert run.finish()[0] == -signal.SIGKILL, output.read_text()
    assert files(tmp_path) == [".hf.part"]
    assert "shard-0.safetensors" in files(tmp_path / ".hf.part")  # it was under way
    write(tmp_path / "hf", make_llama())
    assert files(tmp_path) == ["hf"]


def test_a_full_disk_is_told_and_cleared_up(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # a file may not grow further
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"hf could not be written: .* MB are free there"):
            write(tmp_path / "hf", llama)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == []


def test_an_interrupted_export_clears_up(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield next(weights_of(llama, Layout(llama.config)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "hf", llama, weights=interrupted())
    assert files(tmp_path) == []
