"""Every data file parses on the command line and reads rows of its data set's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from transformers import AutoTokenizer

from logra_lightning.data import MixedDataModule, PromptDataModule, read
from tests.command_line import parse
from tests.conftest import ROOT, TINY_POLICY
from tests.data.rows import ready, write

PRESETS = sorted((ROOT / "configs" / "data").glob("*.yaml"))

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def init_args(preset: str) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs" / "data" / f"{preset}.yaml").read_text())
    return {"tokenizer": str(TINY_POLICY), "prompts_per_step": 1} | config["init_args"]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_replaces_the_data_of_a_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preset: Path
) -> None:
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["model"]["engine"] = {"class_path": "logra_lightning.engines.TorchEngine"}
    # What the command line keeps of these where the class stays the same would spoil the rows.
    options = {"path": "o.jsonl", "name": "o", "columns": {"o": "o"}, "label": "o", "val_size": 7}
    options |= {"split": "o", "prompt_template": "{o}", "prompts_per_step": 5}
    config["data"] = {"class_path": "logra_lightning.data.PromptDataModule", "init_args": options}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    base = str(tmp_path / "base.yaml")
    cli = parse(monkeypatch, "fit", "--config", base, "--data", str(preset))
    assert cli.datamodule.tokenizer_path == cli.model.model_path == "examples/tiny_policy"
    assert cli.datamodule.prompts_per_step == 5
    wanted = yaml.safe_load(preset.read_text())
    made = cli.config["fit"]["data"].as_dict()
    assert made["class_path"] == wanted["class_path"]
    replaced = (options.keys() - {"prompts_per_step"}) & made["init_args"].keys()
    assert replaced
    for name in replaced:
        assert made["init_args"][name] == wanted["init_args"].get(name), name


def local(monkeypatch: pytest.MonkeyPatch, files: dict[tuple[str, str], str]) -> None:
    """Let hub names, by (path, split), be files; slices and everything else are as they are."""
    load = read._load

    def instead(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        return load(files[path, split.partition("[")[0]], name, split)

    monkeypatch.setattr(read, "_load", instead)


GSM8K = {"question": "1 + 2", "answer": "1 + 2 = <<1+2=3>>3\n#### 3"}
MATH = {
    "problem": "5 - 1",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\boxed{4}$.",
    "answer": "4",
    "unique_id": 1,
}
MATH_SETS = [("rasbt/math_full_minus_math500", "train"), ("HuggingFaceH4/MATH-500", "test")]
DAPO = {
    "prompt": "6 + 6",
    "solution": "12",
    "data_source": "math_dapo",
    "source_prompt": [{"content": "6 + 6", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "12", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "b"},
}


def words(data: Any, prompts: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_path)
    return ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in prompts.prompt_ids]


def test_gsm8k_asks_its_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = write(tmp_path / "gsm8k.jsonl", [GSM8K, GSM8K])
    local(monkeypatch, {("openai/gsm8k", "train"): rows, ("openai/gsm8k", "test"): rows})
    data = ready(PromptDataModule(**init_args("gsm8k")))
    assert [word[:10] for word in words(data, data.train)] == ["<bos>1 + 2"] * 2
    assert data.val.rows == [{**GSM8K, "source": "gsm8k"}] * 2


def test_math_validates_on_what_it_does_not_train_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = write(tmp_path / "math.jsonl", [MATH])
    val = write(tmp_path / "math500.jsonl", [{**MATH, "problem": "7 - 1", "answer": "6"}])
    local(monkeypatch, dict(zip(MATH_SETS, (train, val), strict=True)))
    data = ready(PromptDataModule(**init_args("math")))
    assert words(data, data.train)[0].startswith("<bos>5 - 1")
    assert words(data, data.val)[0].startswith("<bos>7 - 1")
    assert [row["answer"] for row in data.train.rows + data.val.rows] == ["4", "6"]


def test_dapo_math_holds_its_last_problems_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = write(tmp_path / "dapo.jsonl", [DAPO] * 300)
    local(monkeypatch, {("open-r1/DAPO-Math-17k-Processed", "train"): rows})
    data = ready(PromptDataModule(**init_args("dapo_math")))
    assert (len(data.train), len(data.val)) == (300 - 256, 256)
    assert words(data, data.train)[0].startswith("<bos>6 + 6")
    others = {name: value for name, value in DAPO.items() if name != "solution"}
    assert data.train.rows[0] == {**others, "answer": "12", "source": "dapo_math"}


def test_math_mix_gives_two_of_math_to_one_of_gsm8k(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gsm8k = write(tmp_path / "gsm8k.jsonl", [GSM8K] * 4)
    math = write(tmp_path / "math.jsonl", [MATH] * 5)
    names = [("openai/gsm8k", "train"), ("openai/gsm8k", "test")]
    local(monkeypatch, dict.fromkeys(names, gsm8k) | dict.fromkeys(MATH_SETS, math))
    parser = ArgumentParser()
    parser.add_subclass_arguments(MixedDataModule, "data")
    config = {
        "class_path": "logra_lightning.data.MixedDataModule",
        "init_args": init_args("math_mix") | {"prompts_per_step": 3},
    }
    data = ready(parser.instantiate_classes(parser.parse_object({"data": config})).data)
    batches = list(data.train_dataloader())
    assert len(batches) == 3
    for batch in batches:
        assert sorted(batch.columns["source"]) == ["gsm8k", "math", "math"]
        assert set(batch.columns["problem"]) == {"1 + 2", "5 - 1"}
    assert [row["source"] for row in data.val.rows] == ["gsm8k"] * 4 + ["math"] * 5
