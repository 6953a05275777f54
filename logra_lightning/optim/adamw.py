"""AdamW: for the weights beside the sketches in `RowAdam`, and alone as the dense baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from logra_lightning.distributed.sharding import local
from logra_lightning.optim.grad_norm import not_finite
from logra_lightning.optim.state import load_groups_
from logra_lightning.optim.step_counts import StepCounts


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
    """torch's AdamW, which clips, skips what is not finite, and keeps its options through a resume.

    A step in which all gradients are exactly zero changes nothing, and neither does one in which a
    gradient is not finite; `RowAdam` does the same. The state of a checkpoint is loaded, but the
    options of this run hold.

    Args:
        params: name and parameter, of those to train.
        options: options of AdamW.
        max_grad_norm: clip the norm of all gradients together to this value; None does not clip.

    Attributes:
        counts: how many steps were committed and skipped; more than three skipped steps in a row
            end the run.
        grad_norm: norm of all gradients of the last step before clipping.
        overruled: after loading, options that differ from those in the checkpoint, as in `RowAdam`.
    """

    overruled: dict[str, tuple[object, object]]

    def __init__(
        self,
        params: Iterable[tuple[str, Parameter]],
        options: AdamWOptions,
        max_grad_norm: float | None = None,
    ) -> None:
        self._named = dict(params)
        self.max_grad_norm = max_grad_norm
        self.counts = StepCounts()
        self.grad_norm = 0.0
        self._steps = 0
        super().__init__(list(self._named.values()), **options.of_group())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, then make the step unless the gradient is zero or not finite.

        Raises:
            FloatingPointError: more than three steps in a row were skipped.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(list(gradients.values()))
        self.grad_norm, step = norm.item(), self._steps
        self._steps += 1
        if not math.isfinite(self.grad_norm):
            norms = {name: torch.linalg.vector_norm(g).item() for name, g in gradients.items()}
            problem = not_finite(norms, list(norms)) or f"the norm of the gradient is {norm}"
            self.counts.skip(step, problem, in_gradient=True)
        elif self.grad_norm > 0:  # else AdamW would move weights by the moments of earlier steps
            limit = self.max_grad_norm or math.inf
            nn.utils.clip_grads_with_norm_(self._named.values(), limit, norm)
            super().step()
            self.counts.commit()
        return result

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the counts of steps."""
        counts = self.counts.state_dict() | {"steps": self._steps}
        return super().state_dict() | {"counts": counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and step counters; of the options, only what a scheduler made of `lr`."""
        own = [group.copy() for group in self.param_groups]
        super().load_state_dict(state_dict)
        labels = ["model.adamw"] * len(own)
        self.overruled = load_groups_(own, state_dict["param_groups"], labels)
        for group, before in zip(self.param_groups, own, strict=True):
            group.update(before, params=group["params"])
        counts = dict(state_dict.get("counts", {}))  # 0.1.0 had none
        self._steps = counts.pop("steps", 0)
        self.counts.load_state_dict(counts)


def dense_adamw(
    named: Iterable[tuple[str, Parameter]],
    options: AdamWOptions,
    max_grad_norm: float | None,
    strategy: str,
) -> DenseAdamW:
    """AdamW on what requires a gradient; logs that nothing is sketched, warns where bf16 loses.

    Args:
        named: name and parameter, of all of the model.
        options: options of AdamW.
        max_grad_norm: as in `DenseAdamW`.
        strategy: name of the strategy's class, for the log.
    """
    trained = [(name, param) for name, param in named if param.requires_grad]
    rank_zero_info(
        f"{strategy} has no sketches: AdamW trains {sum(p.numel() for _, p in trained):,} weights "
        f"densely."
    )
    if any(p.dtype != torch.float32 for _, p in trained):
        rank_zero_warn(
            "AdamW updates bf16 weights here, where small updates vanish in rounding: use "
            "trainer.precision=bf16-mixed, or a sketching strategy, which keeps exact masters"
        )
    return DenseAdamW(trained, options, max_grad_norm)


def dense_metrics(optimizer: Optimizer) -> dict[str, float]:
    """What a step of `DenseAdamW` logs; nothing of another optimizer, which a callback logs."""
    if not isinstance(optimizer, DenseAdamW):
        return {}
    skipped = float(optimizer.counts.skipped_steps)
    return {"optim/grad_norm": optimizer.grad_norm, "optim/skipped_steps": skipped}
