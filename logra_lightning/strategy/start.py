"""Loads the policy for a strategy: in every process, or in process 0 for all that share it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import nn

from logra_lightning.distributed.first_process import FirstProcessWeights
from logra_lightning.distributed.processes import (
    all_or_none,
    from_first_process,
    process_index,
)
from logra_lightning.policy.load import exact_buffers, load_policy, policy_without_weights
from logra_lightning.strategy.fsdp import SketchFSDPStrategy


def load_policy_for(strategy: Strategy, path: str, **model_kwargs: Any) -> nn.Module:
    """The policy as a strategy needs it; every process must call it.

    Under `sketch_fsdp`, process 0 alone reads the weights. The others build the model from its
    config, the model is sharded while it holds no weights, and each process is then sent its rows,
    one weight after the other. So process 0 needs host memory for one copy of the model, and the
    others for none. Under all other strategies each process reads the whole model.

    Args:
        strategy: the trainer's, with its processes already started.
        path: folder or hub name.
        model_kwargs: passed to `from_pretrained`.

    Raises:
        ValueError: there is no such model, or it cannot be trained or sharded; where one process
            cannot load it, all of them raise the same.
    """
    if not isinstance(strategy, SketchFSDPStrategy):
        return load_policy(path, **model_kwargs)
    load = load_policy if process_index() == 0 else policy_without_weights
    policy: Any = all_or_none(lambda: load(path, **model_kwargs))
    with exact_buffers(policy):
        # Before it is sharded, as FSDP is told the dtypes only once.
        strategy.precision_plugin.convert_module(policy)
    weights = FirstProcessWeights(policy, strategy.root_device)
    all_or_none(weights.check)
    weights.take_()
    # Where the stop tokens are; it is a file of its own, which only process 0 has read.
    policy.generation_config = from_first_process(getattr(policy, "generation_config", None))
    strategy.share_out(policy)
    weights.fill_()
    return policy
