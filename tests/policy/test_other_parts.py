"""What a checkpoint holds beside the policy comes out of a run as it went in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from logra_lightning.callbacks import HFExport, SketchAccumulation
from logra_lightning.policy.export import export_checkpoint
from logra_lightning.policy.hf_folder import Layout
from logra_lightning.policy.load import load_config
from logra_lightning.policy.other_parts import WholeLayout, layout_of
from logra_lightning.tokenizer import load_tokenizer
from tests.conftest import TINY_POLICY
from tests.hybrids import make_hybrid
from tests.runs import fit, policy

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def make_whole(folder: Path, *, tied: bool, **saving: Any) -> Path:
    """A random language model with a vision tower, and the tiny policy's tokenizer."""
    tokenizer = load_tokenizer(str(TINY_POLICY))
    text = make_hybrid("Qwen3_5TextConfig").config.to_dict()
    text |= {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision | {"out_hidden_size": 64},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder, **saving)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    return folder


@pytest.mark.filterwarnings("ignore:.*were cut off")  # it is a random model
@pytest.mark.parametrize("tied", [False, True])
def test_the_vision_tower_is_unchanged_and_the_language_model_is_the_trained_one(
    tmp_path: Path, tied: bool
) -> None:
    source = make_whole(tmp_path / "model", tied=tied, max_shard_size="100KB")
    module = policy(model=str(source))
    run = fit(
        tmp_path, module, callbacks=[SketchAccumulation(), HFExport(str(tmp_path / "by_callback"))]
    )
    run.save_checkpoint(tmp_path / "run.ckpt")
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "by_command"))

    before: Any = Qwen3_5ForConditionalGeneration.from_pretrained(source)
    trained = dict(module.policy.named_parameters())
    for folder in (tmp_path / "by_callback", tmp_path / "by_command"):
        whole: Any = Qwen3_5ForConditionalGeneration.from_pretrained(folder)
        tower = before.model.visual.state_dict()
        assert tower.keys() == whole.model.visual.state_dict().keys()
        for name, weight in whole.model.visual.state_dict().items():
            assert torch.equal(weight, tower[name]), name
        language = {f"model.{n}": p for n, p in whole.model.language_model.named_parameters()}
        for name, weight in language.items():
            assert torch.equal(weight, trained[name]), name
        assert (whole.lm_head.weight is whole.model.language_model.embed_tokens.weight) == tied
        assert whole.config.text_config.vocab_size == before.config.text_config.vocab_size
        assert (folder / "preprocessor_config.json").is_file()
        again = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert again.keys() == trained.keys()
        assert all(torch.equal(again[name], weight) for name, weight in trained.items())
    moved = "model.layers.3.self_attn.q_proj.weight"
    start = before.model.language_model.layers[3].self_attn.q_proj.weight
    assert not torch.equal(trained[moved], start)


def test_a_policy_that_is_the_whole_model_has_the_layout_of_its_own() -> None:
    config = load_config(str(TINY_POLICY))
    assert type(layout_of(config, str(TINY_POLICY), {})) is Layout
    assert type(layout_of(config, "", {})) is Layout


def test_a_head_that_the_files_do_not_have_is_added_and_a_tied_one_is_not_kept(
    tmp_path: Path,
) -> None:
    tied, untied = (make_whole(tmp_path / str(tied), tied=tied) for tied in (True, False))
    configs = {folder: load_config(str(folder)) for folder in (tied, untied)}
    text = configs[untied].get_text_config()
    assert "lm_head.weight" in WholeLayout(text, configs[tied], tied).files
    text = configs[tied].get_text_config()
    assert "lm_head.weight" not in WholeLayout(text, configs[tied], untied).files


def test_files_without_the_policy_are_refused(tmp_path: Path) -> None:
    source = make_whole(tmp_path / "model", tied=False)
    config = load_config(str(source))
    empty = tmp_path / "empty"
    shutil.copytree(source, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match=r"cannot be kept: .* no weight for the policy's 'model\."):
        layout_of(config.get_text_config(), str(empty), {})


def test_of_a_hub_name_the_revision_counts(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--model"
    make_whole(repository / "snapshots" / ("1" * 40), tied=False)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text("1" * 40)
    options = {"cache_dir": str(tmp_path), "local_files_only": True, "revision": "v2"}
    config = load_config("owner/model", **options)
    layout = layout_of(config.get_text_config(), "owner/model", options)
    assert any(name.startswith("model.visual.") for name, _ in layout.others())
