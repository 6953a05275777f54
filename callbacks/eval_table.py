"""`EvalTable`: a table in the terminal after each validation."""

from __future__ import annotations

import io
import sys

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 200  # of a log file, where rich would assume 80


class EvalTable(Callback):
    """Prints what a validation found, and how much that is more or less than the one before.

    Takes the metrics that the module logs as `eval/<metric>` and `eval/<source>/<metric>`, where
    `<source>` is where prompts come from: a row `all` and one for each source, a column for each
    metric. A progress bar is printed again below the table.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = {
            name.removeprefix("eval/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("eval/")
        }
        if not values:
            return
        table = _table(values, self._before)
        self._before = values
        terminal = sys.stdout.isatty()
        text = io.StringIO()
        width = None if terminal else _WIDTH
        Console(file=text, force_terminal=terminal, width=width).print(table)
        # A source's name may have letters that the terminal has not.
        encoding = sys.stdout.encoding or "utf-8"
        printable = text.getvalue().strip().encode(encoding, errors="replace").decode(encoding)
        fitting = trainer.state.fn == TrainerFn.FITTING
        step = f" at step {trainer.global_step}" if fitting else ""  # a checkpoint's is not known
        Tqdm.write(f"\nvalidation{step}\n{printable}", file=sys.stdout)


def _table(values: dict[str, float], before: dict[str, float]) -> Table:
    cells: dict[str, dict[str, str]] = {"": {}}  # all prompts come first, under no source
    for name, value in values.items():
        source, _, metric = name.rpartition("/")
        cells.setdefault(source, {})[metric] = _cell(value, before.get(name))
    metrics = list(dict.fromkeys(metric for row in cells.values() for metric in row))
    table = Table(box=box.MARKDOWN)
    table.add_column("source", overflow="fold")
    for metric in metrics:
        table.add_column(Text(metric), justify="right", no_wrap=True)
    for source, row in cells.items():
        if row:
            # Text: a source in brackets is no markup
            table.add_row(Text(source or "all"), *(row.get(metric, "") for metric in metrics))
    return table


def _cell(value: float, before: float | None) -> str:
    digits = 3 if abs(value) < 10 else 1
    change = "" if before is None else f" ({value - before:+.{digits}f})"
    return f"{value:.{digits}f}{change}"
