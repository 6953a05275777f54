"""The dense baseline: AdamW on whole gradients, for strategies without sketches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW

from logra_lightning.sketch import AdamWOptions
from logra_lightning.sketch.hyperparameters import go_on_with


class DenseAdamW(AdamW):
    """torch's AdamW, whose hyper-parameters stay those of now when it loads a checkpoint.

    Attributes:
        overruled: as in `RowAdam`.
    """

    overruled: dict[str, tuple[object, object]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State as saved; hyper-parameters as they are now."""
        own = [group.copy() for group in self.param_groups]
        super().load_state_dict(state_dict)
        self.overruled = {}
        for group, before, saved in zip(
            self.param_groups, own, state_dict["param_groups"], strict=True
        ):
            params = group["params"]
            changed = go_on_with(before, saved)
            group.update(before, params=params)
            self.overruled |= {f"model.adamw {name}": v for name, v in changed.items()}


def dense_adamw(params: Sequence[Parameter], options: AdamWOptions, strategy: str) -> AdamW:
    """AdamW on all of `params`; says that it is not the sketched way, and what it loses."""
    rank_zero_info(
        f"{strategy} has no sketches: AdamW trains {sum(p.numel() for p in params):,} weights "
        f"densely."
    )
    if any(p.dtype != torch.float32 for p in params):
        rank_zero_warn(
            "AdamW updates bf16 weights here, where small updates vanish in rounding: use "
            "trainer.precision=bf16-mixed, or a sketching strategy, which keeps exact masters"
        )
    return DenseAdamW(
        params,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def clip_gradients_(params: Sequence[Parameter], max_norm: float | None) -> Tensor:
    """Clip the norm of all gradients together; returns what it was, [] fp32.

    Gradients that are all zero are taken away: AdamW would move the weights by its moments alone.

    Raises:
        RuntimeError: the norm is not finite.
    """
    limit = max_norm or float("inf")
    norm = nn.utils.clip_grad_norm_(params, limit, error_if_nonfinite=True)
    if norm == 0:
        for param in params:
            param.grad = None
    return norm
