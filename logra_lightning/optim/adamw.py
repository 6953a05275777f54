"""AdamW: beside sketches inside `RowAdam`, and alone as the dense baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.adamw import adamw

from logra_lightning.distributed.sharding import local
from logra_lightning.optim.state import go_on_with


@dataclass(frozen=True)
class AdamWOptions:
    """Options of AdamW, for the weights that are not sketched.

    Args:
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


def adamw_state(param: Parameter) -> dict[str, Tensor]:
    """Moments in fp32, a counter, and an fp32 `master` where the weight is not fp32.

    Of a sharded weight, of the rows that are held.
    """
    held = local(param)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(held, dtype=torch.float32)
    if held.dtype != torch.float32:
        state["master"] = held.to(torch.float32)
    return state


@torch.no_grad()
def adamw_step_(
    group: Mapping[str, Any], states: Mapping[Tensor, dict[str, Tensor]], clip: float
) -> None:
    """One step of the group's parameters that have a gradient, in place.

    Args:
        group: `params`, `lr`, `betas`, `eps`, `weight_decay`.
        states: from `adamw_state`, by parameter.
        clip: multiplies the gradients.
    """
    params = [p for p in group["params"] if p.grad is not None]
    own = [states[p] for p in params]
    held = [local(p) for p in params]
    masters = [s.get("master", p) for p, s in zip(held, own, strict=True)]
    adamw(
        masters,
        [local(p.grad).to(torch.float32) * clip for p in params],
        [s["exp_avg"] for s in own],
        [s["exp_avg_sq"] for s in own],
        [],
        [s["step"] for s in own],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for weight, master in zip(held, masters, strict=True):
        if master.dtype != weight.dtype:
            weight.copy_(master)


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
