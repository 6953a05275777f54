"""Which weights a strategy lets train: its own targets, or in a dense run those of AdamW."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from logra_lightning.optim.adamw import AdamWOptions
from logra_lightning.policy.load import freeze_
from logra_lightning.policy.what_trains import frozen_experts, what_trains
from logra_lightning.strategy.mixin import SketchMixin


def freeze_others_(
    policy: nn.Module, strategy: Strategy, adamw: AdamWOptions, *, train_others: bool
) -> None:
    """Let only the weights that are trained have a gradient.

    Args:
        policy: changed in place.
        strategy: its `targets` are trained, if it sketches.
        adamw: its `targets` are trained otherwise.
        train_others: leave a gradient to all other weights too.

    Raises:
        ValueError: as `find_targets`; it names the option that counts. Or the policy has routed
            experts, which would not train.
    """
    if isinstance(strategy, SketchMixin):
        freeze_(policy, strategy.targets, train_others=train_others)
        way_out = "trainer.strategy.init_args.frozen_experts=true to train the rest"
        allowed = strategy.frozen_experts
    else:
        option = "model.adamw.targets"
        freeze_(policy, adamw.targets, train_others=train_others, option=option)
        way_out, allowed = "model.train_others=true to train all weights", False
    share = frozen_experts(policy)
    if share and not allowed:
        raise ValueError(
            f"{type(policy).__name__} is a mixture of experts, and its routed experts, {share:.0%} "
            f"of its weights, would not train: set {way_out}, or start from a model without experts"
        )


def tell_what_trains(policy: nn.Module, strategy: Strategy) -> None:
    """Log which weights are sketched, trained densely and frozen, once training is set up."""
    sketches = getattr(strategy, "sketches", None) or ()
    rank_zero_info(what_trains(policy, [layer.module for layer in sketches]))
