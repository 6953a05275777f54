"""Every YAML file parses and makes its objects, and what is printed can be read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from logra_lightning.callbacks import RunSummary, SketchAccumulation, StepProgressBar
from logra_lightning.cli import main
from logra_lightning.renamed import CLASSES, OPTIONS, renamed_in
from logra_lightning.types import SamplingParams
from tests.command_line import parse
from tests.conftest import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_every_config_makes_its_objects(
    monkeypatch: pytest.MonkeyPatch, config: Path, subcommand: str
) -> None:
    cli = parse(monkeypatch, subcommand, "--config", str(config))
    kinds = [type(callback) for callback in cli.trainer.callbacks]
    assert {SketchAccumulation, RunSummary, StepProgressBar} <= set(kinds)
    assert cli.datamodule.tokenizer_path == cli.model.model_path


def test_printed_config_reads_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, "fit", "--config", "configs/quickstart.yaml", "--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    first = parse(monkeypatch, "fit", "--config", "configs/quickstart.yaml")
    again = parse(monkeypatch, "fit", "--config", str(tmp_path / "printed.yaml"))
    assert yaml.safe_load(again.parser.dump(again.config)) == yaml.safe_load(
        first.parser.dump(first.config)
    )


def test_callbacks_can_be_switched_off_and_a_users_own_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cli = parse(
        monkeypatch,
        "fit",
        "--config=configs/quickstart.yaml",
        "--run_summary.enabled=false",
        "--sketch_accumulation.refresh_every=3",
        "--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar",
    )
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert "RunSummary" not in kinds
    assert "StepProgressBar" not in kinds
    assert "TQDMProgressBar" in kinds
    accumulation = next(c for c in cli.trainer.callbacks if isinstance(c, SketchAccumulation))
    assert accumulation.refresh_every == 3


def edited(tmp_path: Path, edit: Any) -> str:
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    edit(config)
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c["model"].update(grup_size=3), ["grup_size", "did you mean", "group_size"]),
        (lambda c: c["model"]["sampling"].update(temprature=1), ["temprature", "temperature"]),
        (
            lambda c: c["model"].update(evaluation={"sampling": {"temprature": 1}}),
            ["temprature", "temperature"],
        ),
        (lambda c: c["model"]["rewards"][0].update(wieght=1), ["wieght", "weight"]),
        (lambda c: c["data"]["init_args"].update(sise=3), ["sise", "size"]),
        (lambda c: c["trainer"].update(max_step=3), ["max_step", "max_steps"]),
        (lambda c: c["trainer"]["strategy"]["init_args"].update(rnk=3), ["rnk", "rank"]),
        (lambda c: c.update(modle={"seed": 1}), ["modle", "model"]),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Any,
    expected: list[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, "fit", "--config", edited(tmp_path, edit))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    for part in ("did you mean", *expected):
        assert part in error
    assert len(error.splitlines()) < 12


PARTS: list[tuple[str, Any]] = [  # one option each of groups of which others are set, or none
    ("model.sampling.temperature", 0.9),
    ("model.evaluation.sampling.temperature", 0.6),
    ("model.dynamic_sampling.max_refills", 1),
    ("model.objective.entropy_coefficient", 0.1),
    ("model.memory.logprob_chunk_tokens", 64),
    ("model.adamw.weight_decay", 0.1),
    ("model.optimizer.init_args.update_ratio", 0.003),
    ("data.init_args.prompts_per_step", 32),
    ("kl_budget.start", 0.03),
    ("weight_sync.enabled", False),
    ("trainer.strategy.init_args.projection", "gaussian"),
]


def test_a_group_set_in_part_is_the_same_from_a_file_and_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overlay: dict[str, Any] = {}
    for path, value in PARTS:
        *groups, last = path.split(".")
        inner = overlay
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    engine = "--model.engine=logra_lightning.engines.TorchEngine"
    shared = ["fit", "--config", "configs/quickstart.yaml", engine]
    from_file = parse(monkeypatch, *shared, "--config", str(tmp_path / "overlay.yaml"))
    from_flags = parse(monkeypatch, *shared, *(f"--{path}={value}" for path, value in PARTS))
    found, other = (yaml.safe_load(c.parser.dump(c.config))["fit"] for c in (from_file, from_flags))
    assert found == other
    # The other options are those of the file before, and of the group that is inherited from.
    assert found["model"]["sampling"]["max_tokens"] == 6
    assert found["model"]["adamw"]["lr"] == 3e-4
    assert found["kl_budget"]["end"] == 0.01
    assert found["trainer"]["strategy"]["init_args"]["rank"] == 128
    for made in (from_file.model, from_flags.model):
        assert made.evaluation.sampling == SamplingParams(max_tokens=6, temperature=0.6)
        assert made.dynamic_sampling.max_refills == 1


OLD: list[tuple[dict[str, Any], list[str], str]] = [
    ({"model": {"loss": {"class_path": "x.Y"}}}, [], "model.loss is model.objective.loss now"),
    ({}, ["--model.reference_kl.coefficient=1"], "is model.objective.reference_kl.coefficient now"),
    ({"model": {"eval_sampling": {"top_p": 0.9}}}, [], "is model.evaluation.sampling now"),
    ({}, ["--model.activation_checkpointing", "true"], "is model.memory.activation_checkpointing"),
    (
        {"model": {"engine": {"class_path": "logra_lightning.rollout.VLLMEngine"}}},
        [],
        "logra_lightning.rollout.VLLMEngine is logra_lightning.engines.VLLMEngine now",
    ),
    ({}, ["--model.engine=rollout.TorchEngine"], "is logra_lightning.engines.TorchEngine now"),
    (
        {},
        ["--model.optimizer", "logra_lightning.sketch.RowAdam"],
        "is logra_lightning.optim.RowAdam",
    ),
]


@pytest.mark.parametrize(("overlay", "flags", "expected"), OLD)
def test_an_old_path_is_told_its_new_one_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overlay: dict[str, Any],
    flags: list[str],
    expected: str,
) -> None:
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    files = ["--config", "configs/quickstart.yaml", "--config", str(tmp_path / "overlay.yaml")]
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, "fit", *files, *flags)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    if overlay:
        assert "overlay.yaml: model." in line


def test_new_paths_are_no_old_ones() -> None:
    arguments = ["fit", "--config", "configs/gsm8k_smollm2_cpu.yaml"]
    arguments += [f"--{new}=1" for new in OPTIONS.values()]
    arguments += [f"--model.engine=logra_lightning.{new}" for new in CLASSES.values()]
    assert renamed_in(arguments) == ""


@pytest.mark.parametrize("group", ["objective", "evaluation", "memory"])
def test_null_for_a_group_of_options_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    path = edited(tmp_path, lambda c: c["model"].update({group: None}))
    with pytest.raises(SystemExit):
        parse(monkeypatch, "fit", "--config", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model.{group} is null: leave it out")


def test_null_for_a_callback_names_the_switch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(tmp_path, lambda c: c.update(sketch_accumulation=None))
    with pytest.raises(SystemExit):
        parse(monkeypatch, "fit", "--config", path)
    assert "set sketch_accumulation.enabled=false" in capsys.readouterr().err


def test_a_users_mistake_is_one_line_and_a_bug_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = edited(tmp_path, lambda c: c["model"].update(group_size=1))
    monkeypatch.setattr(sys, "argv", ["logra_lightning", "fit", "--config", path])
    with pytest.raises(SystemExit, match=r"^error: model.group_size is 1, but GRPO"):
        main()
    monkeypatch.setenv("LOGRA_TRACEBACK", "1")
    with pytest.raises(ValueError, match="group_size is 1"):
        main()


CHOICES = {
    "advantage": "GRPO DrGRPO RLOO ReinforcePlusPlus ReinforcePlusPlusBaseline RunningBaseline",
    "loss": "PPOClip CISPO GSPO Reinforce",
    "normalizer": "TokenMean SequenceMean ConstantLength",
    "correction": "TokenTruncation TokenMask ProductMask GeometricMeanMask NoCorrection",
    "reference_kl": "K1 K2 K3",
}
NEEDED = {"ConstantLength": {"length": 6}}
REWARDS = {"FormatMatch": {"pattern": "a"}, "SoftOverlong": {"max_tokens": 8, "buffer_tokens": 2}}


def with_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]) -> Any:
    """The module that the quick start's file makes with some options of the model changed."""

    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["model"]["engine"] = {"class_path": "logra_lightning.engines.TorchEngine"}
    config["model"] |= options
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    return parse(monkeypatch, "fit", "--config", str(tmp_path / "x.yaml")).model


@pytest.mark.parametrize("number", range(6))
def test_every_class_of_the_objective_can_be_named_in_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    chosen = {option: names.split() for option, names in CHOICES.items()}
    chosen = {option: names[number % len(names)] for option, names in chosen.items()}
    options = {
        option: {
            "class_path": f"logra_lightning.objective.{name}",
            "init_args": NEEDED.get(name, {}),
        }
        for option, name in chosen.items()
    }
    module = with_model(monkeypatch, tmp_path, {"objective": options})
    made = {"advantage": module.advantage, "normalizer": module.normalizer}
    made |= {name: getattr(module.objective, name) for name in ("loss", "correction")}
    made["reference_kl"] = module.objective.reference_kl
    assert {option: type(value).__name__ for option, value in made.items()} == chosen


def test_every_reward_can_be_named_in_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    classes = ["MathReward", "GymScore", "FormatMatch", "SoftOverlong", "RepetitionPenalty"]
    rewards: list[dict[str, Any]] = [{"function": "logra_lightning.rewards.exact_match"}]
    for name in classes:
        path = f"logra_lightning.rewards.{name}"
        rewards.append({"function": {"class_path": path, "init_args": REWARDS.get(name, {})}})
    module = with_model(monkeypatch, tmp_path, {"rewards": rewards})
    assert [type(reward.function).__name__ for reward in module.rewards] == ["function", *classes]


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("normalizer", "TokenMask"), ("correction", "K1"), ("advantage", "TokenMean")],
)
def test_a_class_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, wrong: str
) -> None:
    options = {option: {"class_path": f"logra_lightning.objective.{wrong}"}}
    with pytest.raises(SystemExit) as stop:
        with_model(monkeypatch, tmp_path, {"objective": options})
    assert stop.value.code == 2
