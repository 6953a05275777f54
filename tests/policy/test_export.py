"""The policy in a checkpoint comes out as the trainer had it, for transformers and for vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from logra_lightning import PolicyModule
from logra_lightning.cli import main
from logra_lightning.policy.export import export_checkpoint
from logra_lightning.policy.hf_folder import Written
from tests.conftest import ROOT, TINY_POLICY, make_llama
from tests.runs import fit, policy

pytestmark = pytest.mark.usefixtures("private_datasets_cache")

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_model(folder: Path, *, tied: bool = True) -> Path:
    """The tiny policy's tokenizer with a chat template, a generation config, a random model."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    make_llama(tie_word_embeddings=tied, **options).save_pretrained(folder)
    # A temperature without do_sample, as some models on the hub have it.
    generation = {"eos_token_id": [2, 5], "temperature": 0.7, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def trained(tmp_path: Path, model: Path, **options: Any) -> tuple[PolicyModule, str]:
    """A module after two steps, and its checkpoint."""
    module = policy(model=str(model), train_others=True)
    run = fit(tmp_path, module, **options)
    run.save_checkpoint(tmp_path / "run.ckpt")
    return module, str(tmp_path / "run.ckpt")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 15)[None]).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_logits_tokenizer_and_generation_config_are_the_trainers(
    tmp_path: Path, tied: bool, precision: str
) -> None:
    model = make_model(tmp_path / "model", tied=tied)
    module, checkpoint = trained(tmp_path, model, precision=precision)
    written = export_checkpoint(checkpoint, str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert torch.equal(logits(loaded), logits(module.policy))
    start = AutoModelForCausalLM.from_pretrained(model, dtype=loaded.dtype)
    assert not torch.equal(logits(loaded), logits(start))
    assert loaded.config.tie_word_embeddings == tied
    assert written.nbytes == sum(p.nbytes for p in loaded.parameters())

    tokenizer, own = (AutoTokenizer.from_pretrained(p) for p in (tmp_path / "hf", model))
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.chat_template == own.chat_template == TEMPLATE
    assert tokenizer("1 + 2 - 3 =").input_ids == own("1 + 2 - 3 =").input_ids
    ours, theirs = (GenerationConfig.from_pretrained(p) for p in (tmp_path / "hf", model))
    assert ours.to_dict() == theirs.to_dict()
    assert loaded.generation_config.eos_token_id == [2, 5]


def test_a_config_that_the_run_changed_is_the_one_that_is_written(tmp_path: Path) -> None:
    module = policy(model_kwargs={"max_position_embeddings": 48, "rms_norm_eps": 1e-3})
    fit(tmp_path, module).save_checkpoint(tmp_path / "run.ckpt")
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (loaded.config.max_position_embeddings, loaded.config.rms_norm_eps) == (48, 1e-3)
    assert torch.equal(logits(loaded), logits(module.policy))


def test_a_policy_that_the_user_made_is_exported_as_well(tmp_path: Path) -> None:
    module = policy()
    module.tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    made = AutoModelForCausalLM.from_pretrained(TINY_POLICY, rms_norm_eps=1e-3)
    module.policy = made.train()
    fit(tmp_path, module).save_checkpoint(tmp_path / "run.ckpt")
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.config.rms_norm_eps == 1e-3
    assert torch.equal(logits(loaded), logits(module.policy))


def test_dtype_rounds_what_was_trained_in_fp32(tmp_path: Path) -> None:
    module, checkpoint = trained(tmp_path, TINY_POLICY)
    export_checkpoint(checkpoint, str(tmp_path / "hf"), dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    for name, weight in module.policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16()), name


def test_a_moved_model_is_named_by_hand(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    module, checkpoint = trained(tmp_path, model)
    moved = shutil.move(model, tmp_path / "moved")
    with pytest.raises(ValueError, match="'.*/model', which is not there: say with --model where"):
        export_checkpoint(checkpoint, str(tmp_path / "hf"))
    make_llama().save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="its vocab_size is 61, the checkpoint's is 19"):
        export_checkpoint(checkpoint, str(tmp_path / "hf"), model=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="there is no model folder '/nowhere/model'"):
        export_checkpoint(checkpoint, str(tmp_path / "hf"), model="/nowhere/model")
    assert not (tmp_path / "hf").exists()
    export_checkpoint(checkpoint, str(tmp_path / "hf"), model=str(moved))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(loaded), logits(module.policy))


def test_a_checkpoint_of_another_module_needs_the_model_named(tmp_path: Path) -> None:
    llama = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    weights = {f"policy.{name}": weight for name, weight in llama.state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="does not say which model it started from: name it with"):
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "hf"))
    export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "hf"), model=str(TINY_POLICY))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits(loaded), logits(llama))
    weights["policy.lm_head.weight"] = weights["policy.lm_head.weight"] + 1
    torch.save({"state_dict": weights}, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="are tied by the config, but differ"):
        export_checkpoint(str(tmp_path / "b.ckpt"), str(tmp_path / "b"), model=str(TINY_POLICY))
    del weights["policy.model.norm.weight"]
    torch.save({"state_dict": weights}, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match="not those of a LlamaForCausalLM: missing 'model.norm"):
        export_checkpoint(str(tmp_path / "c.ckpt"), str(tmp_path / "c"), model=str(TINY_POLICY))


class Unsafe:
    """Not plain data, so a checkpoint with it is not read."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no checkpoint '.*a.ckpt': set ckpt_path to one"),
        ("folder", "is a folder: export reads checkpoints of one file"),
        (b"", "is not a whole checkpoint"),
        (b"not a checkpoint", "is not a whole checkpoint"),
        ([1, 2], "is not a checkpoint of Lightning"),
        ({"state_dict": {"net.weight": torch.ones(2)}}, "has no policy: export reads those of"),
        ({"state_dict": {}, "more": Unsafe()}, "holds more than tensors and plain data"),
    ],
)
def test_what_is_no_checkpoint_of_a_policy_is_told(
    tmp_path: Path, content: Any, message: str
) -> None:
    path = tmp_path / "a.ckpt"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(str(path), str(tmp_path / "hf"))


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["logra_lightning", "export", *args])
    main()


def test_the_command_says_where_and_how_to_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint = trained(tmp_path, TINY_POLICY)
    monkeypatch.setattr("logra_lightning.cli.find_spec", lambda name: name == "vllm" or None)
    capsys.readouterr()
    folder = tmp_path / "hf"
    run_main(monkeypatch, "--ckpt_path", checkpoint, "--output_dir", str(folder))
    assert capsys.readouterr().out.splitlines() == [
        f"exported: {folder} (1,191,936 bytes of weights, float32)",
        f"open it:  AutoModelForCausalLM.from_pretrained('{folder}')",
        f"serve it: python -m vllm.entrypoints.openai.api_server --model {folder}",
    ]
    with pytest.raises(SystemExit, match="error: there is something in output_dir"):
        run_main(monkeypatch, "--ckpt_path", checkpoint, "--output_dir", str(folder))
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--ckpt_path", checkpoint, "--output_dri", str(folder))
    assert "did you mean 'output_dir'?" in capsys.readouterr().err


def test_no_command_of_vllm_is_printed_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @wraps(export_checkpoint)
    def written(**_: object) -> Written:
        return Written(Path("hf"), 0, "float32")

    monkeypatch.setattr("logra_lightning.cli.export_checkpoint", written)
    monkeypatch.setattr("logra_lightning.cli.find_spec", lambda name: None)
    run_main(monkeypatch, "--ckpt_path", "a.ckpt", "--output_dir", "hf")
    assert "vllm" not in capsys.readouterr().out


def test_the_command_that_is_printed_names_a_program_that_is_there() -> None:
    pytest.importorskip("vllm")
    assert importlib.util.find_spec("vllm.entrypoints.openai.api_server") is not None


def test_help_shows_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, shown in ((["--help"], "logra_lightning export`"), (["export", "--help"], "--model")):
        monkeypatch.setattr(sys, "argv", ["logra_lightning", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0
        assert shown in " ".join(capsys.readouterr().out.split())


# Anonymous memory: pages of the checkpoint's file go whenever the system wants them.
MEMORY = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig
from logra_lightning.policy import export, hf_folder

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

folder = Path(sys.argv[1])
export.MAX_SHARD_BYTES = 10_000_000
export.export_checkpoint(str(folder / "a.ckpt"), str(folder / "warm"), str(folder), "bfloat16")
before, most, save = anonymous(), 0, hf_folder.save_file

def watched(*args, **kwargs):
    global most
    save(*args, **kwargs)
    most = max(most, anonymous())

hf_folder.save_file = watched
done = export.export_checkpoint(str(folder / "a.ckpt"), str(folder / "hf"), str(folder), "bfloat16")
print(done.nbytes, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_that_of_a_shard_not_of_the_model(tmp_path: Path) -> None:
    options = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    llama = make_llama(vocab_size=19, tie_word_embeddings=True, **options)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(tmp_path)
    llama.config.save_pretrained(tmp_path)
    weights = {f"policy.{name}": weight for name, weight in llama.state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "a.ckpt")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written, grown = map(int, done.stdout.split())
    assert written > 80e6
    assert grown < 20e6


VLLM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3,
              kv_cache_memory_bytes=1 << 26)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print("TOKENS", json.dumps([o.outputs[0].token_ids for o in llm.generate(prompts, greedy)]))
    chat = [{"role": "user", "content": "1 + 2 - 3 ="}]
    print("CHAT", json.dumps(llm.chat(chat, greedy)[0].prompt_token_ids))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_opens_the_folder_and_continues_as_transformers_does(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = tmp_path / "model"
    shutil.copytree(TINY_POLICY, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    _, checkpoint = trained(tmp_path, model)
    folder = tmp_path / "hf"
    export_checkpoint(checkpoint, str(folder))
    texts = ["State the final answer to the following arithmetic problem: 1 + 2 - 3 =", "4 + 5"]
    prompts = [tokenizer(text).input_ids for text in texts]
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(folder), json.dumps(prompts)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    printed = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line[:5] in ("TOKEN", "CHAT ")
    )
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, tokens in zip(prompts, json.loads(printed["TOKENS"]), strict=True):
        with torch.no_grad():
            best = loaded(torch.tensor([prompt + tokens])).logits[0].argmax(dim=-1)
        assert len(tokens) == 8
        assert best[len(prompt) - 1 : -1].tolist() == tokens
    chat = tokenizer("1 + 2 - 3 =", add_special_tokens=False).input_ids
    assert json.loads(printed["CHAT"]) == chat  # the template came along
