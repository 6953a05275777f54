"""AdamW: for the weights beside the sketches in `RowAdam`, and alone as the dense baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.adamw import adamw

from logra_lightning.distributed.sharding import local
from logra_lightning.optim.state import load_groups_


@dataclass(frozen=True)
class AdamWOptions:
    """Options of AdamW, for the weights that are not sketched.

    Args:
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        targets: names of the layers that are trained where the strategy has no sketches, as the
            `targets` of a strategy that has; when left out, those that it would sketch.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    targets: list[str] | None = None

    def of_group(self) -> dict[str, Any]:
        """What a group of parameters of an optimizer takes: all but `targets`."""
        options = asdict(self)
        del options["targets"]
        return options


# Inside RowAdam.


def adamw_state(param: Parameter) -> dict[str, Tensor]:
    """The state of a dense weight before its first step; of a sharded one, of the rows held here.

    Returns:
        `step` [] fp32 on the CPU; the moments `exp_avg` and `exp_avg_sq`, fp32 in the shape of the
        weight; and of a weight that is not fp32 its fp32 `master`.
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
    """Make one AdamW step, in place, for the parameters of a group that have a gradient.

    Args:
        group: `params` and what `AdamWOptions.of_group` returns.
        states: parameter to its state, from `adamw_state`.
        clip: factor that gradients are multiplied by.
    """
    params = [p for p in group["params"] if p.grad is not None]
    own = [states[p] for p in params]
    held = [local(p) for p in params]
    masters = [state.get("master", p) for p, state in zip(held, own, strict=True)]
    adamw(
        masters,
        [local(p.grad).to(torch.float32) * clip for p in params],
        [state["exp_avg"] for state in own],
        [state["exp_avg_sq"] for state in own],
        [],
        [state["step"] for state in own],
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


# The dense baseline.


class DenseAdamW(AdamW):
    """torch's AdamW, which loads the state of a checkpoint but keeps the options of this run.

    Attributes:
        overruled: after loading, options that differ from those in the checkpoint, as in `RowAdam`.
    """

    overruled: dict[str, tuple[object, object]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and step counters; of the options, only what a scheduler made of `lr`."""
        own = [group.copy() for group in self.param_groups]
        super().load_state_dict(state_dict)
        labels = ["model.adamw"] * len(own)
        self.overruled = load_groups_(own, state_dict["param_groups"], labels)
        for group, before in zip(self.param_groups, own, strict=True):
            group.update(before, params=group["params"])


def dense_adamw(params: Sequence[Parameter], options: AdamWOptions, strategy: str) -> AdamW:
    """AdamW on all of `params`; logs that nothing is sketched, and warns where bf16 loses updates.

    Args:
        params: the parameters to train.
        options: options of AdamW.
        strategy: name of the strategy's class, for the log.
    """
    rank_zero_info(
        f"{strategy} has no sketches: AdamW trains {sum(p.numel() for p in params):,} weights "
        f"densely."
    )
    if any(p.dtype != torch.float32 for p in params):
        rank_zero_warn(
            "AdamW updates bf16 weights here, where small updates vanish in rounding: use "
            "trainer.precision=bf16-mixed, or a sketching strategy, which keeps exact masters"
        )
    return DenseAdamW(params, **options.of_group())


def clip_gradients_(params: Sequence[Parameter], max_norm: float | None) -> Tensor:
    """Clip the norm of all gradients together; returns the norm before clipping, [] fp32.

    When all gradients are zero they are set to None, since AdamW would move weights without a
    gradient by the moments of earlier steps.

    Args:
        params: parameters with their gradients.
        max_norm: largest norm; None does not clip.

    Raises:
        RuntimeError: the norm is not finite.
    """
    limit = max_norm or float("inf")
    norm = nn.utils.clip_grad_norm_(params, limit, error_if_nonfinite=True)
    if norm == 0:
        for param in params:
            param.grad = None
    return norm
