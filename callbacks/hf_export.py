"""`HFExport`: the trained policy as a folder for `transformers` and vLLM, when training ends."""

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
from logra_lightning.sketch.projection import canonical_name


class HFExport(Callback):
    """Writes a Hugging Face folder at the end of `fit`.

    It works with any module that has `policy`, a causal language model of `transformers`, and
    `tokenizer`, when training starts; the policy may be sharded by FSDP2. Weights are gathered one
    at a time, and rank 0 writes them. A run that fails is not exported; its checkpoint can be, with
    `python -m logra_lightning export`.

    Where the folder turns out not to be writable when training ends, on a full disk for instance,
    the other callbacks still end theirs, so that a last checkpoint is saved, before the run fails.

    Args:
        output_dir: folder to make; must not be there, or be empty. `hf` in the run's log folder
            when left out.
        dtype: of the weights; `auto` leaves them as the trainer computes with them.

    Raises:
        ValueError: an unknown dtype.
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
        """Raise ValueError where the folder could not be written at the end."""
        self._layout = self._written = self._problem = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        log_dir = trainer.log_dir or trainer.default_root_dir  # all ranks must ask
        self._folder = Path(self.output_dir or Path(log_dir) / "hf")
        problem = None
        if process_index() == 0:  # the others may not see its disk
            try:
                check_output_dir(self._folder)
            except ValueError as error:
                problem = f"HFExport: {error}"
        problem = _of_first_process(problem)
        if problem is not None:
            raise ValueError(problem)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError where the policy could not be exported at the end."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        policy, _ = _policy_and_tokenizer(pl_module)
        self._layout = Layout(policy.config)
        weights = _weights(policy)
        self._layout.check(weights)
        for name, weight in weights.items():
            if not is_cut_by_rows(weight):
                placements = weight.placements  # type: ignore[attr-defined]
                raise ValueError(
                    f"HFExport gathers weights that are sharded by rows over one group of ranks, "
                    f"but {name!r} has placements {placements}"
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
        for _ in weights:  # the other ranks take part in each gather, whatever became of rank 0
            pass
        self._problem = _of_first_process(problem)
        self._layout = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise RuntimeError where the export failed, now that a last checkpoint has been saved."""
        if self._problem is not None:
            raise RuntimeError(self._problem)
        if self._layout is not None:
            rank_zero_warn(
                "HFExport wrote nothing, because there was nothing left to train: export the "
                "checkpoint with python -m logra_lightning export"
            )

    def summary(self) -> str:
        """Where the folder lies, for the last lines of a run."""
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
    """Each weight, whole, on the CPU of rank 0; every rank must go through all of them."""
    for name in layout.shapes:
        yield name, on_first_process(whole(weights[name]))


def _of_first_process(problem: str | None) -> str | None:
    """What rank 0 found; every rank must ask."""
    return of_all_processes(problem)[0]
