"""`EvalTable`: prints a table of the metrics after each validation."""

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

_WIDTH = 200  # columns where the output is a file; rich would assume 80


class EvalTable(Callback):
    """Prints a table after each validation, with the change since the validation before.

    The table has a column for each metric, a row `all` for the metrics that the module logs as
    `eval/<metric>`, and a row for each source of prompts, logged as `eval/<source>/<metric>`:

        | source |           pass@1 |
        |--------|------------------|
        |    all |   0.750 (+0.125) |
        |  gsm8k |   0.500 (+0.250) |
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
        # A source's name may have letters that the terminal cannot show.
        encoding = sys.stdout.encoding or "utf-8"
        printable = text.getvalue().strip().encode(encoding, errors="replace").decode(encoding)
        # Outside of fit, the module says at which step the weights were saved.
        fitting = trainer.state.fn == TrainerFn.FITTING
        number = trainer.callback_metrics.get("step", trainer.global_step if fitting else None)
        step = "" if number is None else f" at step {int(number)}"
        Tqdm.write(f"\nvalidation{step}\n{printable}", file=sys.stdout)


def _table(values: dict[str, float], before: dict[str, float]) -> Table:
    cells: dict[str, dict[str, str]] = {"": {}}  # first the row of all prompts
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
            # As Text, so that a source in brackets is not taken for markup.
            table.add_row(Text(source or "all"), *(row.get(metric, "") for metric in metrics))
    return table


def _cell(value: float, before: float | None) -> str:
    digits = 3 if abs(value) < 10 else 1
    change = "" if before is None else f" ({value - before:+.{digits}f})"
    return f"{value:.{digits}f}{change}"
