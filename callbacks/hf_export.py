"""`HFExport`: the trained policy as a folder for `transformers` and vLLM, when training ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from logra_lightning.hf_folder import DType, Layout, Written, check_output_dir, write_folder
from logra_lightning.ranks import of_all_ranks, rank
from logra_lightning.sharding import on_rank_0, whole
from logra_lightning.sketch.projection import canonical_name


class HFExport(Callback):
    """Writes a Hugging Face folder at the end of `fit`.

    It works with any module that has `policy`, a causal language model of `transformers`, and
    `tokenizer`, when training starts; the policy may be sharded by FSDP2. Weights are gathered one
    at a time, and rank 0 writes them. A run that fails is not exported; its checkpoint can be, with
    `python -m logra_lightning export`.

    Args:
        output_dir: folder to make; must not be there, or be empty. `hf` in the run's log folder
            when left out.
        dtype: of the weights; `auto` leaves them as the trainer computes with them.
    """

    def __init__(self, output_dir: str | None = None, dtype: DType = "auto") -> None:
        self.output_dir = output_dir
        self.dtype = dtype
        self._layout: Layout | None = None
        self._folder = Path()
        self._written: Written | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError where the folder could not be written at the end."""
        self._layout = self._written = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        log_dir = trainer.log_dir or trainer.default_root_dir  # all ranks must ask
        self._folder = Path(self.output_dir or Path(log_dir) / "hf")
        problem = None
        if rank() == 0:  # the others may not see its disk
            try:
                check_output_dir(self._folder)
            except ValueError as error:
                problem = f"HFExport: {error}"
        _raise_everywhere(problem, ValueError)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError where the policy could not be exported at the end."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        policy, _ = _policy_and_tokenizer(pl_module)
        self._layout = Layout(policy.config)
        weights = _weights(policy)
        self._layout.check(weights)
        for name, weight in weights.items():
            if isinstance(weight, DTensor) and tuple(weight.placements) != (Shard(0),):
                raise ValueError(
                    f"HFExport gathers weights that are sharded by rows over one group of ranks, "
                    f"but {name!r} has placements {weight.placements}"
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._layout is None:
            return
        policy, tokenizer = _policy_and_tokenizer(pl_module)
        weights = _gathered(_weights(policy), self._layout)
        problem = None
        if rank() == 0:
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
                    f"HFExport could not write {str(self._folder)!r}: {error}. The weights are in "
                    f"the run's checkpoint, if it saves one: python -m logra_lightning export"
                )
        for _ in weights:  # the other ranks take part in each gather, whatever became of rank 0
            pass
        _raise_everywhere(problem, RuntimeError)

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
        yield name, on_rank_0(whole(weights[name]))


def _raise_everywhere(problem: str | None, error: type[Exception]) -> None:
    """Raise what rank 0 found, on all ranks."""
    found = of_all_ranks(problem)[0]
    if found is not None:
        raise error(found)
