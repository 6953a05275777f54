"""`RolloutLogger`: shows completions in TensorBoard or W&B, and writes them to JSONL files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from logra_lightning.callbacks.rollout_files import RolloutFiles
from logra_lightning.types import Rollouts, evenly_spaced

_TEXTS = ("prompt", "completion")


class HasRollouts(Protocol):
    """What `RolloutLogger` asks of a `LightningModule`."""

    rollouts: Rollouts | None
    """The rollouts of the batch that was just trained."""

    def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        """Turn lists of token ids into texts."""
        ...


class RolloutLogger(Callback):
    """Shows some completions in the logger every few steps, and writes all of them to files.

    The module has `rollouts` and `decode`, as `HasRollouts` says. It may also have `eval_rows`:
    after a validation, a list of dictionaries with `row`, `source`, `prompt`, `completion`,
    `reward`, `length` and `truncated`. If it logs `step`, that is the step of a validation.

    In the logger, completions of process 0 stand under `rollout/samples`, from step 1 on every
    `every_n_steps` steps, and under `eval/samples` after each validation. TensorBoard shows them as
    text. Loggers with `log_table` or `log_text` (W&B) get a table, other loggers nothing.

    The file `rollouts.jsonl` has one row per rollout: `step`, `row` (its number in the data set, or
    null), `prompt`, `completion`, `reward` (null where none applies), `rewards` (each reward by
    name before it is weighted, null where it does not apply), `advantage`, `length` (in tokens) and
    `truncated`.
    `step` counts optimizer steps, those of the batch included. `eval_<step>.jsonl` has all
    `eval_rows` of a validation. Where several processes train, each writes files of its own, such
    as `rollouts_process0.jsonl`. A resumed run removes the rows of the steps that it makes again.
    When a file cannot be written, a warning says so once, and training goes on without files. With
    `trainer.fast_dev_run` there are none.

    Args:
        every_n_steps: number of steps from one showing in the logger to the next.
        num_samples: how many completions are shown, evenly spread over the batch; 0 shows none.
        jsonl: whether to write the files.
        jsonl_every_n_steps: number of steps from one that is written to `rollouts.jsonl` to the
            next; 1 writes every step.
        max_chars: longest text that is shown; of a longer one the middle is left out. Files always
            have the whole text.
        dirpath: folder of the files; when left out, the trainer's log folder.

    Raises:
        ValueError: a value is out of range, the folder is not a local one, or, when training
            starts, the module has no `rollouts` or no `decode`.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        num_samples: int = 4,
        jsonl: bool = True,
        jsonl_every_n_steps: int = 1,
        max_chars: int = 4000,
        dirpath: str | None = None,
    ) -> None:
        if min(every_n_steps, jsonl_every_n_steps, max_chars) < 1 or num_samples < 0:
            raise ValueError(
                f"rollout_logger needs every_n_steps, jsonl_every_n_steps and max_chars of at "
                f"least 1 and num_samples not negative, got {every_n_steps}, "
                f"{jsonl_every_n_steps}, {max_chars} and {num_samples}"
            )
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.jsonl = jsonl
        self.jsonl_every_n_steps = jsonl_every_n_steps
        self.max_chars = max_chars
        self.dirpath = dirpath
        self._files: RolloutFiles | None = None
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self.jsonl or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        if "://" in folder:
            raise ValueError(
                f"rollout_logger writes local files, and the log directory is {folder}: set "
                f"rollout_logger.dirpath to a local folder, or rollout_logger.jsonl=false"
            )
        suffix = f"_process{trainer.global_rank}" if trainer.world_size > 1 else ""
        self._files = RolloutFiles(Path(folder), suffix)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in ("rollouts", "decode"):
            if not hasattr(pl_module, name):
                raise ValueError(
                    f"RolloutLogger needs {type(pl_module).__name__} to have `rollouts` (the "
                    f"logra_lightning.types.Rollouts of the last batch, or None) and "
                    f"`decode(token_ids)` (to texts); it has no {name!r}"
                )
        if self._files is not None:
            self._files.resume(trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        rollouts: Rollouts | None = module.rollouts
        if rollouts is None:
            return
        shown = self.num_samples if self._is_turn(trainer, self.every_n_steps) else 0
        if self._files is not None and self._is_turn(trainer, self.jsonl_every_n_steps):
            rows = _rows(module, rollouts, trainer.global_step)
            self._files.append(rows)
        elif shown and trainer.is_global_zero:
            rows = _rows(module, rollouts.spread(shown), trainer.global_step)
        else:
            return
        self._show(trainer, "rollout/samples", rows, shown, trainer.global_step)

    def _is_turn(self, trainer: Trainer, every: int) -> bool:
        """Whether one of the batch's steps is step 1, 1 + `every`, 1 + 2 * `every` and so on."""
        return (trainer.global_step - 1) // every > (self._step_before - 1) // every

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = getattr(pl_module, "eval_rows", None)
        if trainer.sanity_checking or not rows:
            return
        step = int(trainer.callback_metrics.get("step", trainer.global_step))
        if self._files is not None:
            self._files.write(f"eval_{step}", rows)
        self._show(trainer, "eval/samples", rows, self.num_samples, step)

    def _show(
        self, trainer: Trainer, tag: str, rows: Sequence[Mapping[str, Any]], count: int, step: int
    ) -> None:
        """Give `count` of the rows, evenly spaced, to the loggers that can show texts."""
        chosen = [rows[i] for i in evenly_spaced(len(rows), count)]
        if not chosen or not trainer.is_global_zero:
            return
        short = [
            {k: _short(v, self.max_chars) if isinstance(v, str) else v for k, v in row.items()}
            for row in chosen
        ]
        for logger in trainer.loggers:
            table = getattr(logger, "log_table", getattr(logger, "log_text", None))
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(tag, markdown(short), step)
            elif table is not None:
                flat = [_flat(row) for row in short]
                columns = list(flat[0])
                data = [[row.get(column) for column in columns] for row in flat]
                table(tag, columns=columns, data=data, step=step)


def _rows(module: HasRollouts, rollouts: Rollouts, step: int) -> list[dict[str, Any]]:
    """One dictionary of plain values per rollout."""
    prompts = list(dict.fromkeys(map(tuple, rollouts.prompt_ids)))  # one for each group
    texts = dict(zip(prompts, module.decode([list(ids) for ids in prompts]), strict=True))
    completions = module.decode([c.token_ids for c in rollouts.completions])
    by_name = {name: values.tolist() for name, values in rollouts.rewards_by_name.items()}
    rewards, advantages = rollouts.rewards.tolist(), rollouts.advantages.tolist()
    return [
        {
            "step": step,
            "row": rollouts.rows[i] if rollouts.rows[i] >= 0 else None,
            "prompt": texts[tuple(rollouts.prompt_ids[i])],
            "completion": completions[i],
            "reward": _or_none(rewards[i]),
            "rewards": {name: _or_none(values[i]) for name, values in by_name.items()},
            "advantage": advantages[i],
            "length": len(completion.token_ids),
            "truncated": completion.truncated,
        }
        for i, completion in enumerate(rollouts.completions)
    ]


def _or_none(reward: float) -> float | None:
    """The reward; None for NaN, which means that it does not apply."""
    return None if math.isnan(reward) else reward


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as markdown: for each a heading, its numbers, and its texts in fenced blocks."""
    parts = []
    for i, row in enumerate(rows):
        place = "" if row.get("row") is None else f", row {row['row']}"
        numbers = "\n".join(
            f"{name}: {_number(value)}"
            for name, value in _flat(row).items()
            if name not in ("step", "row", *_TEXTS)
        )
        parts += [f"### {i + 1}. reward {_number(row['reward'])}{place}", _fenced(numbers)]
        for name in _TEXTS:
            parts += [f"**{name}**", _fenced(row[name])]
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its inner dictionaries unpacked: `rewards/<name>` in the place of `rewards`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def _short(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head, tail = text[: (max_chars + 1) // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n[... {len(text) - max_chars} characters ...]\n{tail}"
