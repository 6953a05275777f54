"""AdamW for the weights that are not sketched, with fp32 masters of those in bf16.

torch's own update on state that `RowAdam` keeps, so that one optimizer makes one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from logra_lightning.sharding import local


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
