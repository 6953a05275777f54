"""The command line: `python -m logra_lightning fit|validate|test|predict --config FILE`, `export`.

Lightning's own CLI with our module, any data module, our callbacks as top-level groups that a
user's `callbacks:` list cannot lose, and errors that name the nearest valid option.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

import logra_lightning.data
import logra_lightning.engines
import logra_lightning.strategy  # noqa: F401  (short class names are those of what is imported)
from logra_lightning.callbacks import (
    EngineCheck,
    EvalTable,
    KLBudget,
    Preemption,
    RolloutLogger,
    RunSummary,
    SketchAccumulation,
    StepCheckpoint,
    StepProgressBar,
    Throughput,
    ValidateAtEnds,
    WeightSync,
)
from logra_lightning.checkpoints.newest import chosen_checkpoint
from logra_lightning.checks import null_group
from logra_lightning.cli_parser import PROGRAM, Parser
from logra_lightning.config_files import doubled_key
from logra_lightning.hub import hub_options
from logra_lightning.module import PolicyModule
from logra_lightning.policy.export import export_checkpoint
from logra_lightning.renamed import renamed_in
from logra_lightning.seeding import seed_for_all

# Attached in this order, each with a switch `enabled`.
_CALLBACKS: dict[str, type[Callback]] = {
    "preemption": Preemption,
    "sketch_accumulation": SketchAccumulation,
    "kl_budget": KLBudget,
    "weight_sync": WeightSync,
    "engine_check": EngineCheck,
    "throughput": Throughput,
    "rollout_logger": RolloutLogger,
    "eval_table": EvalTable,
    "validate_at_ends": ValidateAtEnds,
    "run_summary": RunSummary,
}

_MODEL_GROUPS = ("sampling", "objective", "evaluation", "memory", "adamw")

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


class LograCLI(LightningCLI):
    """`PolicyModule` and a data module from YAML, run by a Lightning Trainer."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        _quiet_lightning()
        words = sys.argv[1:] if args is None else args
        self._words: list[str] = words if isinstance(words, list) else []
        Parser.words = self._words
        super().__init__(
            PolicyModule,
            LightningDataModule,
            subclass_mode_data=True,
            trainer_defaults=_TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": PROGRAM,
                "description": (
                    "RL post-training of language models with gradient sketches. Beside the "
                    f"subcommands below, `{PROGRAM} export` writes the policy of a checkpoint as "
                    "a Hugging Face folder."
                ),
            },
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
            **kwargs,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that is asked for: making the options of the others takes seconds."""
        every = LightningCLI.subcommands()
        asked = {name: skipped for name, skipped in every.items() if [name] == self._words[:1]}
        return asked or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.model", "data.init_args.tokenizer")
        parser.link_arguments("model.model_kwargs", "data.init_args.tokenizer_kwargs", hub_options)
        for key, callback in _CALLBACKS.items():
            parser.add_class_arguments(callback, key, instantiate=False)
            parser.add_argument(
                f"--{key}.enabled", type=bool, default=True, help="false leaves it out"
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; old names are told with their new ones, and doubled keys in files are refused."""
        if message := renamed_in(self._words) or doubled_key(self._words):
            parser.exit(2, f"error: {message}\n")
        super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Refuse groups of options that are null, which nothing could be made of."""
        model = self._get(self.config, "model")
        for name in _MODEL_GROUPS:
            if model[name] is None:
                self.parser.exit(2, f"error: {null_group(name)}\n")
        for key in _CALLBACKS:
            if self._get(self.config, key) is None:
                reason = f"{key} is null: to leave it out, set {key}.enabled=false"
                self.parser.exit(2, f"error: {reason}\n")

    def instantiate_classes(self) -> None:
        """Make all objects; those without a seed of their own have that of `seed_everything`."""
        with seed_for_all(int(self._get(self.config, "seed_everything"))):
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        parser = self._parser(self.subcommand)
        for key, callback in _CALLBACKS.items():
            group = self._get(self.config_init, key)
            options = vars(group).copy()
            if options.pop("enabled"):
                (self.config_init[self.subcommand])[key] = callback(**options)
                parser.callback_keys.append(key)
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": self._default_callbacks()}
        trainer = super().instantiate_trainer(**kwargs)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Some of Lightning's own would still save when training ends.
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
        return trainer

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

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        options = super()._prepare_subcommand_kwargs(subcommand)
        options["ckpt_path"] = chosen_checkpoint(self.trainer, subcommand, options["ckpt_path"])
        return options

    @rank_zero_only
    def after_predict(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
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
        # vLLM's process group of one makes Lightning think of several devices.
        r"It is recommended to use `self\.log\(.*sync_dist=True",
        ".*does not have many workers",  # prompts are tokenized once, nothing is left to load
    ):
        warnings.filterwarnings("ignore", message)


def export(args: Sequence[str]) -> None:
    """Run the subcommand `export`."""
    parser = Parser(
        prog=f"{PROGRAM} export",
        description="Write the policy of a checkpoint as a folder that transformers and vLLM open.",
    )
    Parser.words = args
    parser.add_function_arguments(export_checkpoint, as_group=False)
    written = export_checkpoint(**parser.parse_args(list(args)).as_dict())
    print(f"exported: {written}")
    print(f"open it:  AutoModelForCausalLM.from_pretrained({str(written.folder)!r})", flush=True)
    if find_spec("vllm") is not None:
        # `vllm serve` is the same, but does not start with the package for CPUs.
        serve = "python -m vllm.entrypoints.openai.api_server --model"
        print(f"serve it: {serve} {shlex.quote(str(written.folder))}", flush=True)


def main() -> None:
    """Run the command line.

    Mistakes that this package found are told in one line; LOGRA_TRACEBACK=1 shows where.
    """
    try:
        if sys.argv[1:2] == ["export"]:  # needs neither a configuration nor a trainer
            export(sys.argv[2:])
        else:
            LograCLI()
    except (ValueError, ImportError, RuntimeError, FloatingPointError, OSError) as error:
        if os.environ.get("LOGRA_TRACEBACK") or not _is_ours(error):
            raise
        sys.exit(f"error: {error}")


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it, as opposed to something that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).resolve().parent
    raised_in = Path(frames[-1].filename).resolve()
    return raised_in.is_relative_to(here) or raised_in.is_relative_to(
        (here / "callbacks").resolve()
    )
