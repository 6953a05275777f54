"""An error of the command line names the file, the whole key, and the nearest valid one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from logra_lightning.cli_parser import Parser
from logra_lightning.config_files import doubled_key
from tests.command_line import parse
from tests.conftest import ROOT

REWARD = "logra_lightning.rewards.exact_match"


def stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """The lines that the command line ends with."""
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, "fit", "--config=configs/quickstart.yaml", *words)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("overlay", "path", "nearest"),
    [
        ({"model": {"evaluation": {"sampling": {"temprature": 1}}}}, None, "temperature"),
        ({"model": {"rewards": [{"function": REWARD, "wieght": 1}]}}, "model.rewards[0]", "weight"),
        ({"data": {"init_args": {"tasks": [{"name": "a", "wieght": 1}]}}}, None, "weight"),
        ({"trainer": {"strategy": {"init_args": {"rnk": 1}}}}, None, "rank"),
        ({"kl_budget": {"strt": 1}}, None, "start"),
    ],
)
def test_a_mistyped_key_is_named_with_file_line_and_path(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overlay: dict[str, Any],
    path: str | None,
    nearest: str,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(overlay))
    lines = stopped(monkeypatch, capsys, f"--config={file}")
    (place,) = [line for line in lines if str(file) in line]
    number, _, key = place.removeprefix(f"{file}, line ").partition(": ")
    typed = key.rpartition(".")[2]
    assert f"{typed}:" in file.read_text().splitlines()[int(number) - 1]
    assert f"did you mean '{key.removesuffix(typed)}{nearest}'?" in lines
    assert path is None or key == f"{path}.{typed}"


def test_a_value_of_the_wrong_type_is_found_in_the_file_and_not_where_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  sampling: {max_tokens: many}\n")
    lines = stopped(monkeypatch, capsys, f"--config={file}")
    assert f"{file}, line 2: model.sampling.max_tokens" in lines
    lines = stopped(monkeypatch, capsys, "--trainer.max_steps=many")
    assert not any("quickstart.yaml" in line for line in lines)


def test_a_doubled_key_is_refused_and_a_file_over_another_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  adamw: {lr: 2e-4}\n  group_size: 4\n  adamw: {lr: 3e-4}\n")
    (line,) = stopped(monkeypatch, capsys, f"--config={file}")
    twice = "line 4: model.adamw stands there twice, first in line 2: remove one of them"
    assert line == f"error: {file}, {twice}"
    file.write_text("model:\n  adamw: {lr: 2e-4}\n")
    both = "--config=configs/quickstart.yaml", f"--config={file}"
    assert parse(monkeypatch, "fit", *both).model.adamw.lr == 2e-4


def test_an_unknown_word_of_a_plain_parser_gets_the_nearest_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser(prog="python -m logra_lightning export")
    parser.add_argument("--output_dir", type=str)
    with pytest.raises(SystemExit):
        parser.parse_args(["--output_dri=a"])
    error = capsys.readouterr().err
    assert "did you mean 'output_dir'?\nsee python -m logra_lightning export --help\n" in error


def test_the_shipped_configs_have_no_doubled_keys() -> None:
    files = sorted(map(str, (ROOT / "configs").rglob("*.yaml")))
    assert len(files) >= 3
    assert doubled_key(files) == ""
