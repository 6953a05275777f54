"""`SketchFSDPStrategy`: gradient sketches on several devices that share the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from logra_lightning.distributed.processes import backend_for, copy_from_first_process_
from logra_lightning.distributed.sharding import (
    held_rows,
    is_cut_by_rows,
    is_sharded,
    local,
    on_first_process,
    parts_of,
    whole,
)
from logra_lightning.names import named
from logra_lightning.strategy.mixin import SketchMixin


class SketchFSDPStrategy(SketchMixin, ModelParallelStrategy):
    """Gradient sketches on several devices that share the weights (FSDP2): `strategy: sketch_fsdp`.

    One process trains on each device and holds some rows of each weight: of 1,000 rows, four
    processes hold 250 each. The same holds for residuals and for the moments of dense weights.
    While a layer runs, its whole weights are gathered.

    Sketches are summed over the processes once per step, so every process has the whole direction,
    which its engine needs too, and merges it into the rows that it holds. Gradients of dense
    weights are summed by FSDP in every backward pass.

    The models of `transformers` in the module are sharded layer by layer. Embeddings and head are
    gathered apart from the layers, and together where they are tied. A module that calls
    `fully_shard` itself, in `configure_model`, is left as it is. `load_policy_for` reads a model in
    process 0 alone.

    Processes run their forward passes together, so all of them must run the same number;
    `PolicyModule` sees to it. Checkpoints are one file that process 0 writes, and any of our
    strategies can load it.

    Args:
        process_group_backend: how processes talk to each other; when left out, `gloo` on CPUs, and
            on CUDA `cpu:gloo,cuda:nccl`, which was not run: tensors by nccl, all else by gloo.
        timeout_s: seconds that a process waits for the others before it fails.
        options: `rank`, `targets` and the other options of `SketchMixin`.

    Raises:
        ValueError: torch is older than 2.13.
    """

    strategy_name = "sketch_fsdp"
    shards_weights = True

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        self._shared: list[Any] = []  # sharded, and not yet made ready to run
        if Version(torch.__version__).release < (2, 13):  # older ones cannot run a head apart
            raise ValueError(f"sketch_fsdp needs torch 2.13 or newer, this is {torch.__version__}")
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size="auto",
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )

    def _get_process_group_backend(self) -> str:
        backend = self._process_group_backend or backend_for(self.root_device)
        return backend or super()._get_process_group_backend()

    def setup_environment(self) -> None:
        # Lightning's "auto" would mean tensor parallelism within a node.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        # A weight that FSDP gathers for the first time in inference mode can never be trained.
        trainer = model.trainer
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        trainer.fit_loop.epoch_loop.val_loop.inference_mode = False

    def share_out(self, model: Any) -> None:
        """Shard a `transformers` model of the module; its weights may be on the meta device.

        What is on the meta device must have been filled when the strategy is set up.

        Raises:
            ValueError: the model does not say what its layers are.
        """
        shard_(model, self.device_mesh["data_parallel"])
        self._shared.append(model)

    def model_to_device(self) -> None:
        """Shard the weights, then move the rest to the device.

        Lightning calls this after it has cast the module, and before it makes the optimizer.
        """
        module = self._module
        if self._is_fitting:
            self.freeze_targets()  # FSDP asks only once which weights get a gradient
        if self._shared or not parts_of(module):  # else the module has called fully_shard itself
            for model in _models_of(module):
                if not parts_of(model):
                    self.share_out(model)
        super().model_to_device()  # here FSDP notes that other weights are in the place of its own
        for model in self._shared:
            # Without this, the first module that runs would take itself for the outermost.
            model._get_fsdp_state()._lazy_init()
        self._shared.clear()
        for part in parts_of(module):
            # Sum gradients, since losses divide by the tokens of the whole step. A plain sum, since
            # gloo knows no other.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)  # another process may have used them
        _check_placements(module, self.world_size)
        rest = [p.data for p in module.parameters() if not is_sharded(p)]
        copy_from_first_process_(rest + list(module.buffers()))

    def sum_gradients(self, optimizer: Optimizer) -> None:
        for part in parts_of(self._module):
            part.reshard()  # weights left gathered by a pass without a backward would soon be old
        super().sum_gradients(optimizer)

    # Checkpoints look as if nothing were sharded.

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All rows of all weights, in process 0 only; every process must call it."""
        return {
            name: on_first_process(whole(value)) if is_sharded(value) else value
            for name, value in self._module.state_dict().items()
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the rows that this process holds, from a checkpoint that has all of them."""
        saved, own = checkpoint["state_dict"], self._module.state_dict()
        if strict and saved.keys() != own.keys():
            raise ValueError(
                f"the checkpoint is of another model: missing weights: "
                f"{named(sorted(own.keys() - saved.keys()))}; unknown weights: "
                f"{named(sorted(saved.keys() - own.keys()))}"
            )
        for name in own.keys() & saved.keys():
            value = own[name]
            if value.shape != saved[name].shape:
                raise ValueError(
                    f"the checkpoint is of another model: {name!r} has shape "
                    f"{list(saved[name].shape)} there and {list(value.shape)} here"
                )
            rows = saved[name][held_rows(value)] if is_sharded(value) else saved[name]
            local(value).copy_(rows)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return Strategy.optimizer_state(self, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


def shard_(model: Any, mesh: DeviceMesh) -> None:
    """Shard a `transformers` model, layer by layer; its weights may be on the meta device.

    Args:
        model: the model.
        mesh: the processes that share the weights.

    Raises:
        ValueError: it does not say what its layers are.
    """
    names = set(model._no_split_modules or ())
    # Where one layer lies in another, FSDP wants the inner one first.
    layers = [m for m in reversed(list(model.modules())) if type(m).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not say what its layers are (_no_split_modules), so "
            f"sketch_fsdp cannot shard it: call torch.distributed.fsdp.fully_shard in "
            f"configure_model"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    ends = [[embedding, head]] if is_tied else [[embedding], *([[head]] if head else [])]
    tops = [[model.base_model], *([[model]] if model.base_model is not model else [])]
    for group in [*([layer] for layer in layers), *ends, *tops]:
        # Reshard the outermost group too: what it kept gathered would soon be old.
        fully_shard(group if len(group) > 1 else group[0], mesh=mesh, reshard_after_forward=True)
    if not is_tied:
        embedding.set_unshard_in_backward(False)  # its gradient needs no weight


def _models_of(module: LightningModule) -> list[Any]:
    """The outermost `transformers` models in a module; ValueError where there is none."""
    models = list(_models(module))
    if not models:
        raise ValueError(
            f"sketch_fsdp found no transformers model in {type(module).__name__}: call "
            f"torch.distributed.fsdp.fully_shard in its configure_model"
        )
    return models


def _check_placements(module: nn.Module, processes: int) -> None:
    """Refuse weights that are cut in another way than `distributed.sharding` knows."""
    for name, param in module.named_parameters():
        if not isinstance(param, DTensor):
            continue
        if not is_cut_by_rows(param) or param.device_mesh.size() != processes:
            raise ValueError(
                f"sketch_fsdp needs weights that are sharded by rows over all {processes} "
                f"processes, {name!r} has {param.placements} over {param.device_mesh.size()}: call "
                f"fully_shard with mesh=self.device_mesh['data_parallel']"
            )


def _models(module: nn.Module) -> Iterator[Any]:
    """The outermost `transformers` models in a module."""
    for child in module.children():
        if hasattr(child, "_no_split_modules"):
            yield child
        else:
            yield from _models(child)
