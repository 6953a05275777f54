"""The table has what a validation logged, the change since the one before, and spares the bar."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from logra_lightning.callbacks import EvalTable, StepProgressBar, ValidateAtEnds


class Scored(BoringModel):
    """Logs other numbers at each validation."""

    def __init__(self, validations: list[dict[str, float]]) -> None:
        super().__init__()
        self.validations = iter(validations)

    def validation_step(self, *_: Any) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log_dict(next(self.validations))
        self.log("val_other", 9.0)


def fit(tmp_path: Path, validations: list[dict[str, float]], *callbacks: Callback) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, ValidateAtEnds()],
        max_steps=2,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=any(isinstance(c, StepProgressBar) for c in callbacks),
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Scored(validations))


def tables(output: str) -> list[list[list[str]]]:
    """The cells of each table, line by line, under its title."""
    found: list[list[list[str]]] = []
    for line in output.splitlines():
        if "validation at step" in line:
            found.append([[line.strip()]])
        elif found and line.lstrip().startswith("|") and not re.match(r"\s*\|[-:]", line):
            found[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def test_rows_are_sources_and_the_change_stands_beside_the_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"eval/[b]/pass@1": 0.25, "eval/pass@1": 0.5, "eval/length": 120.0}
    second = {"eval/[b]/pass@1": 0.125, "eval/pass@1": 0.75, "eval/length": 100.5}
    fit(tmp_path, [first, second], EvalTable())
    assert tables(capsys.readouterr().out) == [
        [
            ["validation at step 0"],
            ["source", "pass@1", "length"],
            ["all", "0.500", "120.0"],
            ["[b]", "0.250", ""],
        ],
        [
            ["validation at step 2"],
            ["source", "pass@1", "length"],
            ["all", "0.750 (+0.250)", "100.5 (-19.5)"],
            ["[b]", "0.125 (-0.125)", ""],
        ],
    ]


def test_many_columns_and_long_names_are_whole_in_a_log_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"eval/metric_of_some_length_{i}" for i in range(6)]
    values = dict.fromkeys(names, 1.0)
    fit(tmp_path, [values, values], EvalTable())
    header = tables(capsys.readouterr().out)[1][1]
    assert header == ["source", *(name.removeprefix("eval/") for name in names)]


def test_without_metrics_there_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, [{"val_reward": 1.0}] * 2, EvalTable())
    assert "validation at step" not in capsys.readouterr().out


def screen(output: str) -> list[str]:
    """What a terminal shows after it: carriage returns overwrite, `ESC [A` goes a line up."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", output):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.strip() for line in lines]


@pytest.mark.parametrize("table_first", [True, False])
def test_the_progress_bar_leaves_nothing_among_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table_first: bool
) -> None:
    callbacks: list[Callback] = [EvalTable(), StepProgressBar()]
    fit(tmp_path, [{"eval/pass@1": 0.5}] * 2, *(callbacks if table_first else callbacks[::-1]))
    shown = [line for line in screen(capsys.readouterr().out) if line and line[:2] != "|-"]
    # the second validation comes when the bar is full and stays where it is
    assert shown[3].startswith("step: 100%|")
    assert shown[:3] + shown[4:] == [
        "validation at step 0",
        "| source | pass@1 |",
        "| all    |  0.500 |",
        "validation at step 2",
        "| source |         pass@1 |",
        "| all    | 0.500 (+0.000) |",
    ]


def test_letters_that_the_terminal_lacks_stop_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    fit(tmp_path, [{"eval/日本/pass@1": 0.5, "eval/pass@1": 0.5}] * 2, EvalTable())
    ascii_only.flush()
    rows = tables(ascii_only.buffer.getvalue().decode())[0]  # type: ignore[attr-defined]
    assert rows[3] == ["??", "0.500"]


def test_only_the_first_rank_prints_and_no_sanity_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer._logger_connector._callback_metrics["eval/pass@1"] = torch.tensor(0.5)
    trainer.sanity_checking = True
    EvalTable().on_validation_end(trainer, BoringModel())
    trainer.sanity_checking = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.strategy), "is_global_zero", False)
        EvalTable().on_validation_end(trainer, BoringModel())
    assert "validation" not in capsys.readouterr().out
    EvalTable().on_validation_end(trainer, BoringModel())
    assert "validation\n" in capsys.readouterr().out
