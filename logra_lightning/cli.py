"""The command line: `python -m logra_lightning fit|validate|test|predict --config FILE`.

Lightning's own CLI with our module, any data module, our callbacks as top-level groups that a
user's `callbacks:` list cannot lose, and errors that name the nearest valid option.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from logra_lightning.callbacks import (
    RunSummary,
    SketchAccumulation,
    StepCheckpoint,
    StepProgressBar,
)
from logra_lightning.module import PolicyModule

# Attached in this order, each with a switch `enabled`.
_CALLBACKS = {"sketch_accumulation": SketchAccumulation, "run_summary": RunSummary}

_TRAINER_DEFAULTS = {
    "max_epochs": -1,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "logger": {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": "runs", "name": "logra"},
    },
}


class Parser(LightningArgumentParser):
    """Lightning's parser, with short errors that name the nearest valid option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the reason in a few lines and exit with status 2."""
        # The reason of a nested option stands last, after what was tried before it.
        reason = re.sub(r"\n\s*\n+", "\n", str(message)).strip()
        unknown = re.search(
            r"does not accept (?:nested )?option '([^']+)'|[Uu]nrecognized arguments: --([^\s=]+)"
            r"|Key '([^']+)' is not expected|Option '([^']+)' is not accepted",
            reason,
        )
        if unknown:
            name = next(group for group in unknown.groups() if group)
            close = difflib.get_close_matches(name, self._option_names(), n=1, cutoff=0.5)
            hint = f"\ndid you mean {close[0]!r}?" if close else ""
            reason = f"{reason}{hint}"
        self.exit(2, f"error: {reason}\nsee {self.prog} --help\n")
        raise AssertionError  # exit does not return

    def _option_names(self) -> list[str]:
        names: list[str] = []
        for action in self._actions:
            names += [option.lstrip("-") for option in action.option_strings]
            for parser in getattr(action, "_name_parser_map", {}).values():
                names += parser._option_names()
        return names


class LograCLI(LightningCLI):
    """`PolicyModule` and a data module from YAML, run by a Lightning Trainer."""

    def __init__(self, **kwargs: Any) -> None:
        _quiet_lightning()
        super().__init__(
            PolicyModule,
            LightningDataModule,
            subclass_mode_data=True,
            trainer_defaults=_TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=Parser,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.model", "data.init_args.tokenizer")
        for key, callback in _CALLBACKS.items():
            parser.add_class_arguments(callback, key, instantiate=False)
            parser.add_argument(
                f"--{key}.enabled", type=bool, default=True, help="false leaves it out"
            )
        parser.add_argument(
            "--validate_first",
            type=bool,
            default=True,
            help="fit: validate before the first step, so that the run shows where it began",
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        parser = self._parser(self.subcommand)
        for key, callback in _CALLBACKS.items():
            options = vars(self._get(self.config_init, key)).copy()
            if options.pop("enabled"):
                (self.config_init[self.subcommand])[key] = callback(**options)
                parser.callback_keys.append(key)
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": self._default_callbacks()}
        return super().instantiate_trainer(**kwargs)

    def _default_callbacks(self) -> list[Callback]:
        """A progress bar and checkpoints, unless the user has some or wants none."""
        trainer = self._get(self.config_init, "trainer")
        own = trainer["callbacks"] or []
        callbacks: list[Callback] = []
        if trainer["enable_progress_bar"] is not False and not _has(own, ProgressBar):
            callbacks.append(StepProgressBar())
        if trainer["enable_checkpointing"] is not False and not _has(own, Checkpoint):
            callbacks.append(StepCheckpoint())
        return callbacks

    def before_fit(self) -> None:
        resumed = self._get(self.config_init, "ckpt_path")
        if self._get(self.config_init, "validate_first") and not resumed:
            self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)

    @rank_zero_only
    def after_predict(self) -> None:
        batches = self.trainer.predict_loop.predictions
        directory = Path(self.trainer.log_dir or ".")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "predictions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in (row for batch in batches for row in batch):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"predictions: {path}", flush=True)

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would put a checkpoint's hyper-parameters over the user's own."""


def _has(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _quiet_lightning() -> None:
    """Leave out advertisements and warnings about things that are so on purpose."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    for message in (
        r"`?isinstance\(treespec, LeafSpec\)`? is deprecated",  # inside Lightning
        "Using ModelCheckpoint with manual optimization",  # one batch is one step here
        ".*does not have many workers",  # prompts are tokenized once, nothing is left to load
    ):
        warnings.filterwarnings("ignore", message)


def main() -> None:
    """Run the command line."""
    LograCLI()
