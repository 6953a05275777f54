"""All parts of a model are loaded from one place, and what cannot be loaded is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logra_lightning.hub import checked_path, hub_options, one_line_errors
from logra_lightning.policy.export import export_checkpoint
from logra_lightning.policy.load import load_config, load_policy
from logra_lightning.tokenizer import load_tokenizer
from tests.command_line import parse
from tests.conftest import TINY_POLICY, make_llama
from tests.runs import fit, policy


def test_options_of_the_model_alone_are_left_out() -> None:
    given = {"revision": "v2", "attn_implementation": "eager", "token": "t", "rope_theta": 1.0}
    assert hub_options(given) == {"revision": "v2", "token": "t"}
    assert hub_options(None) == {}


def test_a_hub_name_stays_and_a_home_folder_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert checked_path("~/models/tiny") == str(tmp_path / "models" / "tiny")
    assert checked_path("gpt2") == "gpt2"
    assert checked_path("owner/model") == "owner/model"
    assert checked_path(str(TINY_POLICY)) == str(TINY_POLICY)


@pytest.fixture
def two_revisions(tmp_path: Path) -> dict[str, Any]:
    """Options under which `owner/model` has the revisions `main` and `v2`, as the hub's cache."""
    repository = tmp_path / "cache" / "models--owner--model"
    for number, revision in enumerate(("main", "v2")):
        snapshot = repository / "snapshots" / (str(number) * 40)
        tokenizer = load_tokenizer(str(TINY_POLICY))
        tokenizer.chat_template = f"{revision} {{{{ messages[0]['content'] }}}}"
        tokenizer.save_pretrained(snapshot)
        theta = (1e4, 5e5)[number]
        model = make_llama(vocab_size=len(tokenizer), rope_parameters={"rope_theta": theta})
        model.model.norm.weight.data[0] = theta
        model.generation_config.eos_token_id = (2, 5)[number]
        model.save_pretrained(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(str(number) * 40)
    return {"cache_dir": str(tmp_path / "cache"), "local_files_only": True}


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere", "/nowhere/model", "a/b/c"])
def test_a_folder_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"there is no model folder '{path}': set model.model"):
        checked_path(path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("We couldn't connect to 'https://hub' to load\nthe files."), "cannot be reached"),
        (ValueError("pass the argument `trust_remote_code=True` to"), "{trust_remote_code: true}"),
        (ImportError("Using X needs Y. Run pip install Y."), "Using X needs Y: check model.model"),
        (KeyError("zamba9"), "zamba9"),
    ],
)
def test_errors_of_libraries_become_one_line(error: Exception, told: str) -> None:
    said = pytest.raises(ValueError, match="the model 'a/b' cannot be loaded")
    with said as found, one_line_errors("a/b"):
        raise error
    assert told in str(found.value)
    assert "\n" not in str(found.value)


def test_one_revision_reaches_all_parts_of_a_model(two_revisions: dict[str, Any]) -> None:
    for revision, theta in ("main", 1e4), ("v2", 5e5):
        options = {**two_revisions, "revision": revision}
        tokenizer = load_tokenizer("owner/model", **options)
        assert tokenizer.chat_template == f"{revision} {{{{ messages[0]['content'] }}}}"
        policy = load_policy("owner/model", **options)
        for config in (policy.config, load_config("owner/model", **options)):
            assert config.rope_parameters["rope_theta"] == theta
        assert policy.generation_config.eos_token_id == (2 if revision == "main" else 5)
        assert policy.model.norm.weight[0] == theta


def test_a_checkpoint_of_a_revision_is_exported_with_its_template(
    two_revisions: dict[str, Any], tmp_path: Path
) -> None:
    options = {**two_revisions, "revision": "v2", "token": "secret"}
    trainer = fit(tmp_path, policy(model="owner/model", model_kwargs=options), steps=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert b"secret" not in (tmp_path / "run.ckpt").read_bytes()
    export_checkpoint(str(tmp_path / "run.ckpt"), str(tmp_path / "hf"))
    exported = load_tokenizer(str(tmp_path / "hf"))
    assert exported.chat_template == "v2 {{ messages[0]['content'] }}"


def test_the_command_line_gives_the_models_options_to_the_tokenizer_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = "--model.model_kwargs={revision: v2, attn_implementation: eager}"
    cli = parse(monkeypatch, "fit", "--config", "configs/quickstart.yaml", options)
    assert cli.datamodule.tokenizer_kwargs == {"revision": "v2"}
    assert cli.model.model_kwargs == {"revision": "v2", "attn_implementation": "eager"}


CODE = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    is_own = True
"""


def test_a_tokenizer_with_code_of_its_own_needs_a_word_of_trust(tmp_path: Path) -> None:
    load_tokenizer(str(TINY_POLICY)).save_pretrained(tmp_path)
    (tmp_path / "own_tokenizer.py").write_text(CODE)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "OwnTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="comes with code of its own; if you trust that code, set"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), trust_remote_code=True).is_own
