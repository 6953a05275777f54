"""Samples arrive in TensorBoard and in tables as they are, and every rollout in the files."""

from __future__ import annotations

import html
import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from logra_lightning.callbacks import (
    RolloutLogger,
    SketchAccumulation,
    Throughput,
    ValidateAtEnds,
)
from logra_lightning.callbacks.rollout_logger import markdown
from logra_lightning.rollout import EvaluationOptions
from logra_lightning.types import Completion, Rollouts, SamplingParams
from tests import runs
from tests.two_processes import TwoProcesses

NASTY = [
    "<script>alert(1)</script> **bold** [a](b) $x_1$",
    "```python\nprint('`')\n```",
    "````\n# no heading\n~~~\n|a|b|\n---",
    "    indented\n\n- &amp; &lt; \\ \\n",
    "",
]


class Fake(LightningModule):
    """Two prompts with two completions each; their token ids say the step."""

    def __init__(self, eval_rows: list[dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(1))
        self.rollouts: Rollouts | None = None
        self.eval_rows = eval_rows
        self.updates = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        step = self.global_step + 1
        self.rollouts = Rollouts(
            prompt_ids=[[1], [1], [2, 2], [2, 2]],
            completions=[Completion([step] * n, torch.zeros(n), n == 4) for n in (1, 2, 3, 4)],
            rewards=torch.tensor([0.0, 1.0, 2.0, 3.0]),
            rewards_by_name={"sum": torch.tensor([0.0, 1.0, 2.0, 3.0]), "form": _form()},
            advantages=torch.tensor([-1.0, 1.0, -1.0, 1.0]),
            rows=[7, 7, -1, -1],
        )
        for _ in range(self.updates):
            self.optimizers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        return [" ".join(map(str, ids)) for ids in token_ids]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(1))  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(1))  # type: ignore[arg-type]


def _form() -> torch.Tensor:
    return torch.tensor([0.5, math.nan, 0.5, math.nan])


def fit(
    tmp_path: Path,
    callback: RolloutLogger,
    steps: int,
    module: LightningModule | None = None,
    *,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True, every_n_train_steps=1)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "max_epochs": -1,
        "callbacks": [callback, checkpoint],
        "logger": False,
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    trainer = Trainer(**(defaults | options))
    trainer.fit(module or Fake(), ckpt_path=ckpt_path)
    return trainer


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def texts(folder: str) -> dict[str, dict[int, str]]:
    """Tag to step to what TensorBoard was given."""
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag.removesuffix("/text_summary"): {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
        }
        for tag in events.Tags()["tensors"]
    }


# What TensorBoard shows.


def page_of(source: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library within TensorBoard
        from tensorboard.plugin_util import markdown_to_safe_html
    return str(markdown_to_safe_html(source))


def shown_texts(source: str) -> list[str]:
    """The blocks of a Markdown text as a browser would show them."""
    blocks = re.findall(r"<pre><code>(.*?)\n</code></pre>", page_of(source), re.S)
    return [html.unescape(block) for block in blocks]


@pytest.mark.parametrize("text", NASTY)
def test_special_characters_survive_in_tensorboard(text: str) -> None:
    row = {"row": 3, "prompt": text, "completion": text, "reward": 1.0, "rewards": {"a_b": None}}
    source = markdown([row, row])
    numbers = "reward: 1\nrewards/a_b: none"
    assert shown_texts(source) == [numbers, text, text] * 2
    page = page_of(source)
    assert re.findall("<h[1-6]>(.*?)</h[1-6]>", page) == [f"{i}. reward 1, row 3" for i in (1, 2)]


def test_samples_are_shown_at_the_first_step_and_then_every_so_often(tmp_path: Path) -> None:
    callback = RolloutLogger(every_n_steps=3, num_samples=2, jsonl=False)
    trainer = fit(tmp_path, callback, 5, logger=TensorBoardLogger(tmp_path))
    samples = texts(trainer.log_dir or "")["rollout/samples"]
    assert sorted(samples) == [1, 4]
    numbers = "reward: {}\nrewards/sum: {}\nrewards/form: 0.5\nadvantage: -1\nlength: {}\n"
    assert shown_texts(samples[4]) == [
        *(numbers.format(0, 0, 1) + "truncated: False", "1", "4"),
        *(numbers.format(2, 2, 3) + "truncated: False", "2 2", "4 4 4"),
    ]
    assert "### 1. reward 0, row 7\n" in samples[4]
    assert "### 2. reward 2\n" in samples[4]
    assert not list(tmp_path.rglob("*.jsonl"))


class Unscored(Fake):
    """No reward applies to its third completion."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        assert self.rollouts is not None
        self.rollouts.rewards[2] = math.nan


def test_a_completion_without_a_reward_is_shown_and_written_so(tmp_path: Path) -> None:
    callback = RolloutLogger(num_samples=4)
    trainer = fit(tmp_path, callback, 1, Unscored(), logger=TensorBoardLogger(tmp_path))
    (path,) = tmp_path.rglob("rollouts.jsonl")
    assert [row["reward"] for row in read(path)] == [0.0, 1.0, None, 3.0]
    assert "### 3. reward none\n" in texts(trainer.log_dir or "")["rollout/samples"][1]


def test_a_batch_with_several_updates_skips_no_turn(tmp_path: Path) -> None:
    module = Fake()
    module.updates = 4
    callback = RolloutLogger(every_n_steps=6, jsonl_every_n_steps=9)
    trainer = fit(tmp_path, callback, 20, module, logger=TensorBoardLogger(tmp_path))
    folder = trainer.log_dir or ""
    # turns are steps 1, 7, 13, 19 and 1, 10, 19; batches end at 4, 8, 12, 16, 20
    assert sorted(texts(folder)["rollout/samples"]) == [4, 8, 16, 20]
    written = [row["step"] for row in read(Path(folder) / "rollouts.jsonl")]
    assert written == [4] * 4 + [12] * 4 + [20] * 4


def test_long_texts_lose_their_middle_where_they_are_shown_alone(tmp_path: Path) -> None:
    class Long(Fake):
        def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
            return ["abcdefghij"] * len(token_ids)

    callback = RolloutLogger(num_samples=1, max_chars=5)
    trainer = fit(tmp_path, callback, 1, Long(), logger=TensorBoardLogger(tmp_path))
    samples = texts(trainer.log_dir or "")["rollout/samples"]
    assert shown_texts(samples[1])[1:] == ["abc\n[... 5 characters ...]\nij"] * 2
    rows = read(Path(trainer.log_dir or "") / "rollouts.jsonl")
    assert {row["completion"] for row in rows} == {"abcdefghij"}


class Table(Logger):
    """Takes what `WandbLogger.log_text` takes."""

    name, version = "table", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str], list[list[Any]], int]] = []

    def log_text(
        self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None
    ) -> None:
        self.calls.append((key, columns, data, step or 0))

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def test_a_logger_with_tables_gets_a_table_and_a_csv_logger_nothing(tmp_path: Path) -> None:
    table = Table()
    callback = RolloutLogger(num_samples=2, jsonl=False)
    fit(tmp_path, callback, 1, logger=[CSVLogger(tmp_path), table])
    columns = ["step", "row", "prompt", "completion", "reward", "rewards/sum", "rewards/form"]
    columns += ["advantage", "length", "truncated"]
    first = [1, 7, "1", "1", 0.0, 0.0, 0.5, -1.0, 1, False]
    second = [1, None, "2 2", "1 1 1", 2.0, 2.0, 0.5, -1.0, 3, False]
    assert table.calls == [("rollout/samples", columns, [first, second], 1)]


# The files.


def expected(step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "row": [7, 7, None, None][i],
            "prompt": ["1", "1", "2 2", "2 2"][i],
            "completion": " ".join([str(step)] * (i + 1)),
            "reward": float(i),
            "rewards": {"sum": float(i), "form": [0.5, None, 0.5, None][i]},
            "advantage": [-1.0, 1.0, -1.0, 1.0][i],
            "length": i + 1,
            "truncated": i == 3,
        }
        for i in range(4)
    ]


def test_every_rollout_is_written_and_a_resumed_run_repeats_none(tmp_path: Path) -> None:
    fit(tmp_path, RolloutLogger(num_samples=0), 2)
    last = (tmp_path / "ckpt" / "last.ckpt").rename(tmp_path / "two.ckpt")
    straight = expected(1) + expected(2)
    assert read(tmp_path / "rollouts.jsonl") == straight
    fit(tmp_path, RolloutLogger(), 4, ckpt_path=last)
    # as after a crash at step 4, whose last checkpoint is of step 2
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 5, "ro')
    fit(tmp_path, RolloutLogger(), 3, ckpt_path=last)
    assert read(tmp_path / "rollouts.jsonl") == straight + expected(3)


def test_files_may_hold_some_steps_and_lie_elsewhere(tmp_path: Path) -> None:
    callback = RolloutLogger(jsonl_every_n_steps=2, dirpath=str(tmp_path / "there"))
    fit(tmp_path, callback, 4, logger=TensorBoardLogger(tmp_path))
    assert read(tmp_path / "there" / "rollouts.jsonl") == expected(1) + expected(3)


def test_a_validation_is_shown_and_written(tmp_path: Path) -> None:
    rows = [
        {"row": i, "source": "sums", "prompt": "1+1", "completion": f"{i}", "reward": i / 4}
        | {"length": 1, "truncated": False}
        for i in range(6)
    ]
    callback = RolloutLogger(num_samples=3)
    options = {"val_check_interval": 2, "logger": TensorBoardLogger(tmp_path)}
    trainer = fit(tmp_path, callback, 2, Fake(rows), **options, num_sanity_val_steps=1)
    folder = Path(trainer.log_dir or "")
    assert [path.name for path in folder.glob("eval_*")] == ["eval_2.jsonl"]
    assert read(folder / "eval_2.jsonl") == rows
    samples = texts(str(folder))["eval/samples"]
    assert list(samples) == [2]
    assert shown_texts(samples[2])[2::3] == ["0", "2", "4"]


@pytest.mark.usefixtures("private_datasets_cache")
def test_a_run_of_the_policy_can_be_read_in_files_and_tensorboard(tmp_path: Path) -> None:
    callbacks = [SketchAccumulation(), RolloutLogger(), Throughput(), ValidateAtEnds()]
    options = {"callbacks": callbacks, "limit_val_batches": 1.0}
    run = runs.trainer(tmp_path, steps=2, logger=TensorBoardLogger(tmp_path), **options)
    sampling = SamplingParams(max_tokens=6)
    module = runs.policy(evaluation=EvaluationOptions(sampling, completions=2))
    run.fit(module, datamodule=runs.data(tmp_path))
    folder = Path(run.log_dir or "")
    rows = read(folder / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1] * 16 + [2] * 16
    for row in rows:
        assert row["prompt"].startswith("State the final answer")
        assert row["reward"] == row["rewards"]["digits"] == runs.digits(row["completion"])
    total = float(run.callback_metrics["throughput/total_completion_tokens"])
    assert total == sum(row["length"] for row in rows)
    validated = read(folder / "eval_2.jsonl")
    assert [row["row"] for row in validated] == [row for row in range(8) for _ in range(2)]
    shown = texts(str(folder))
    assert list(shown["rollout/samples"]) == [1]
    assert list(shown["eval/samples"]) == [0, 2]
    assert shown_texts(shown["eval/samples"][2])[2] == validated[0]["completion"]


def test_a_module_without_rollouts_is_told_what_it_needs(tmp_path: Path) -> None:
    class Without(Fake):
        def __init__(self) -> None:
            super().__init__()
            del self.rollouts

    with pytest.raises(ValueError, match=r"needs Without to have `rollouts` .* no 'rollouts'"):
        fit(tmp_path, RolloutLogger(), 1, Without())


def test_batches_without_rollouts_are_passed_over(tmp_path: Path) -> None:
    class Nothing(Fake):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.rollouts = None

    fit(tmp_path, RolloutLogger(), 2, Nothing())
    assert not list(tmp_path.glob("*.jsonl"))


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_samples not negative, got 10, 1, 4000 and -1"):
        RolloutLogger(num_samples=-1)
    with pytest.raises(ValueError, match=r"at least 1 .* got 0, 1, 4000 and 4"):
        RolloutLogger(every_n_steps=0)
    with pytest.raises(ValueError, match=r"is s3://bucket/runs: set rollout_logger.dirpath"):
        fit(tmp_path, RolloutLogger(), 1, default_root_dir="s3://bucket/runs")


def log_in_both(folder: Path) -> None:
    fit(folder, RolloutLogger(), 2, devices=2, strategy="ddp")


@pytest.mark.dist
def test_each_process_writes_its_own_file(two_processes: TwoProcesses, tmp_path: Path) -> None:
    two_processes.run(log_in_both, tmp_path)
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in files] == [f"rollouts_process{i}.jsonl" for i in (0, 1)]
    assert [len(path.read_text().splitlines()) for path in files] == [8, 8]
