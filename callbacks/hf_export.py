"""`HFExport`: writes the trained policy as a folder for `transformers` and vLLM at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from logra_lightning.distributed.processes import of_all_processes, process_index
from logra_lightning.distributed.sharding import is_cut_by_rows, on_first_process, whole
from logra_lightning.policy.hf_folder import (
    DType,
    Layout,
    Written,
    check_dtype,
    check_output_dir,
    write_folder,
)
from logra_lightning.policy.other_parts import layout_of
from logra_lightning.sketch.projection import canonical_name


class HFExport(Callback):
    """Writes the trained policy as a Hugging Face folder when training ends.

    The module needs two attributes when training starts: `policy`, a causal language model of
    `transformers`, which may be sharded by FSDP2, and `tokenizer`. Weights are gathered one at a
    time, and process 0 writes them. Nothing is written when a run fails; its last checkpoint can be
    exported with `python -m logra_lightning export`.

    Where writing fails, for instance on a full disk, the run fails too. It does so after all
    callbacks had their turn, so that a last checkpoint is still saved.

    Args:
        output_dir: folder to write; it must not exist yet, or must be empty. When left out, the
            folder `hf` in the run's log folder.
        dtype: dtype of the written weights; `auto` keeps the dtype that the trainer computes with.

    Raises:
        ValueError: the dtype is unknown.
    """

    def __init__(self, output_dir: str | None = None, dtype: DType = "auto") -> None:
        check_dtype(dtype)
        self.output_dir = output_dir
        self.dtype = dtype
        self._layout: Layout | None = None
        self._folder = Path()
        self._written: Written | None = None
        self._problem: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError if the folder cannot be written."""
        self._layout = self._written = self._problem = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        log_dir = trainer.log_dir or trainer.default_root_dir  # every process must ask for it
        self._folder = Path(self.output_dir or Path(log_dir) / "hf")
        problem = None
        if process_index() == 0:  # other processes may not see its disk
            try:
                check_output_dir(self._folder)
            except ValueError as error:
                problem = f"HFExport: {error}"
        problem = _of_first_process(problem)
        if problem is not None:
            raise ValueError(problem)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if the policy cannot be exported."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        policy, _ = _policy_and_tokenizer(pl_module)
        options = getattr(pl_module, "model_kwargs", None) or {}
        self._layout = layout_of(policy.config, policy.config._name_or_path, options)
        weights = _weights(policy)
        self._layout.check(weights)
        for name, weight in weights.items():
            if not is_cut_by_rows(weight):
                placements = weight.placements  # type: ignore[attr-defined]
                raise ValueError(
                    f"HFExport gathers weights that are sharded by rows over one group of "
                    f"processes, but {name!r} has placements {placements}"
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._layout is None:
            return
        policy, tokenizer = _policy_and_tokenizer(pl_module)
        weights = _gathered(_weights(policy), self._layout)
        problem = None
        if process_index() == 0:
            try:
                self._written = write_folder(
                    self._folder,
                    self._layout,
                    weights,
                    tokenizer=tokenizer,
                    generation_config=policy.generation_config,
                    dtype=self.dtype,
                )
            except Exception as error:
                problem = (
                    f"HFExport: {error}. Export the run's last checkpoint, if it saves one, with "
                    f"python -m logra_lightning export"
                )
        for _ in weights:  # every process takes part in every gather, even if writing has failed
            pass
        self._problem = _of_first_process(problem)
        self._layout = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise RuntimeError if the export failed; by now a last checkpoint has been saved."""
        if self._problem is not None:
            raise RuntimeError(self._problem)
        if self._layout is not None:
            rank_zero_warn(
                "HFExport wrote nothing, because there was nothing left to train: export the "
                "checkpoint with python -m logra_lightning export"
            )

    def summary(self) -> str:
        """A line that says where the folder is, for `RunSummary`; empty if there is none."""
        return f"Hugging Face folder: {self._written}" if self._written else ""


def _policy_and_tokenizer(module: LightningModule) -> tuple[Any, Any]:
    from transformers import PreTrainedModel

    policy, tokenizer = getattr(module, "policy", None), getattr(module, "tokenizer", None)
    kind = type(module).__name__
    if not isinstance(policy, PreTrainedModel):
        raise ValueError(
            f"HFExport needs {kind}.policy to be a model of transformers, got "
            f"{type(policy).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"HFExport needs {kind}.tokenizer to be a tokenizer of transformers, got "
            f"{type(tokenizer).__name__}"
        )
    return policy, tokenizer


def _weights(policy: Any) -> dict[str, Tensor]:
    return {canonical_name(name): weight for name, weight in policy.state_dict().items()}


def _gathered(weights: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, whole on the CPU in process 0; every process must take all of them."""
    for name in layout.shapes:
        yield name, on_first_process(whole(weights[name]))


def _of_first_process(problem: str | None) -> str | None:
    """The problem that process 0 found, if any; every process must ask for it."""
    return of_all_processes(problem)[0]
