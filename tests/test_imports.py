"""Importing the package costs nothing; its names, strategies and short class names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import logra_lightning
from tests.command_line import parse
from tests.conftest import ROOT

HEAVY = ["torch", "lightning", "transformers", "vllm", "datasets", "tensorboard", "numpy", "yaml"]


def python(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_the_package_loads_no_library_and_takes_less_than_half_a_second() -> None:
    printed = python(
        "import sys, time; start = time.process_time(); import logra_lightning; "
        f"print(time.process_time() - start, sorted(set({HEAVY}) & set(sys.modules)))"
    )
    seconds, found = printed.split(" ", 1)
    assert found == "[]"
    assert float(seconds) < 0.5


def test_every_public_name_comes_from_its_room() -> None:
    for name in logra_lightning.__all__:
        value = getattr(logra_lightning, name)
        assert value.__name__ == name
        assert name in dir(logra_lightning)
    assert sorted(logra_lightning._ROOM_OF) == sorted(logra_lightning.__all__)
    with pytest.raises(AttributeError, match="module 'logra_lightning' has no attribute 'Nothing'"):
        _ = logra_lightning.Nothing


def test_strategies_are_known_by_name_once_the_callbacks_are_imported() -> None:
    printed = python(
        "from lightning.pytorch import Trainer; import logra_lightning.callbacks\n"
        "t = Trainer(strategy='sketch', accelerator='cpu', devices=1, logger=False)\n"
        "print('known:', type(t.strategy).__name__)"
    )
    assert printed.splitlines()[-1] == "known: SketchStrategy"


def test_short_class_names_resolve_and_show_in_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--trainer.strategy=SketchStrategy", "--model.objective.loss=GSPO"]
    cli = parse(monkeypatch, "fit", "--config", "configs/quickstart.yaml", *short)
    assert type(cli.trainer.strategy).__name__ == "SketchStrategy"
    assert type(cli.model.objective.loss).__name__ == "GSPO"
    with pytest.raises(SystemExit):
        parse(monkeypatch, "fit", "--help")
    shown = "".join(capsys.readouterr().out.split())  # names may be cut at the end of a line
    for name in ("SketchFSDPStrategy", "MixedDataModule", "GSPO", "RunningBaseline"):
        assert name in shown, name
