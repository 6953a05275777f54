"""`RowAdam`: one optimizer for sketched and dense weights (rows 3, 4 and 8 of the method).

Its step has two halves. `propose` turns the sketches into a direction and changes nothing that
lasts; `step` commits it. Between them a callback may look at the proposal and set `step_scale`.
Both rules only scale the rows of S, so a proposal is one number per row, not a copy of S.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import (
    held_rows,
    is_sharded,
    local,
    on_first_process,
    squared_norms,
    whole,
)
from logra_lightning.optim.adamw import AdamWOptions, adamw_state, adamw_step_
from logra_lightning.optim.proposal import Proposal
from logra_lightning.optim.state import NamedParameters, go_on_with, named, partition
from logra_lightning.sketch.bank import SketchBank, SketchedLayer
from logra_lightning.sketch.factors import Factors
from logra_lightning.sketch.merge import merge_
from logra_lightning.sketch.precision import full_precision


class RowAdam(torch.optim.Optimizer):
    r"""Adam with one second moment per output row and no first moment, on sketches.

    .. math::
        v \leftarrow \beta_2 v + (1 - \beta_2)\, \mathrm{mean}_r(S^2), \qquad
        D = \mathrm{lr} \cdot S / (\sqrt{v / (1 - \beta_2^t)} + \epsilon), \qquad
        W \leftarrow (1 - a\,\mathrm{lr}\,\lambda)\, W - a\, D A

    with step scale a and weight decay :math:`\lambda`. This is the plain rule, whose `lr` a
    scheduler may change; `RelativeRowAdam` is the paper's. Other weights that require
    a gradient are trained by AdamW in the same step. fp32 and bf16 weights are supported; bf16
    ones keep an exact fp32 master (`sketch.master`, or a copy for AdamW's).

    Weights may be sharded (`logra_lightning.sharding`): each rank then updates its own rows, and
    the sketches are those of all ranks.

    Source: LoGRA, arXiv 2610.06647.

    Args:
        params: all parameters of the model, best with their names (`model.named_parameters()`),
            by which checkpoints hold their state. Those that are neither sketched nor require a
            gradient are left alone.
        sketches: the sketches, from the strategy.
        adamw: options for the weights that are not sketched.
        max_grad_norm: clip the norm of the whole gradient first; None does not.
        max_skipped_steps: how many steps in a row may be skipped, because a gradient is not finite
            or someone called `skip`, before the run stops.
        lr: learning rate of the sketched weights.
        beta2: decay of the row moments.
        eps: added to the root of the row moment.
        weight_decay: decoupled, of the sketched weights.

    Attributes:
        step_scale: multiplies the next step; 1 unless set while it is pending.
        last_step_scale: of the last step; 0 where the gradient was zero.
        factors: what the last step merged into the sketched weights; see `take_factors`.
        is_committing: whether some weights have been updated and others not yet.
        skipped_steps: so far.
        rejected_steps: so far.
        overruled: hyper-parameters of a loaded checkpoint that differ from those of now, which
            hold: name to both values.

    Raises:
        ValueError: a value out of range, or no parameter of the sketches among `params`.
    """

    def __init__(
        self,
        params: NamedParameters,
        sketches: SketchBank,
        adamw: AdamWOptions | None = None,
        max_grad_norm: float | None = None,
        *,
        max_skipped_steps: int = 3,
        lr: float = 1e-6,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr <= 0 or eps <= 0 or weight_decay < 0 or not 0 <= beta2 < 1:
            raise ValueError(
                f"need lr > 0, eps > 0, weight_decay >= 0 and 0 <= beta2 < 1, got lr={lr}, "
                f"eps={eps}, weight_decay={weight_decay}, beta2={beta2}"
            )
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive or null, got {max_grad_norm}")
        if max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps must not be negative, got {max_skipped_steps}")
        self.sketches = sketches
        self.max_grad_norm = max_grad_norm
        self.max_skipped_steps = max_skipped_steps
        self.skipped_steps = 0
        self.rejected_steps = 0
        self.is_committing = False
        self._skipped_in_a_row = 0
        self._skip_reason = ""
        self._rejected = False
        self.step_scale = 1.0
        self.last_step_scale = 0.0
        self.proposal: Proposal | None = None
        self.factors: Factors | None = None
        self.overruled: dict[str, tuple[object, object]] = {}
        self._names = named(params, sketches)
        sketched, dense = partition(self._names, sketches)
        adamw = adamw or AdamWOptions()
        groups: list[dict[str, Any]] = [
            {"params": sketched, "lr": lr, "beta2": beta2, "weight_decay": weight_decay}
        ]
        if dense:
            groups.append(
                {"params": dense, "lr": adamw.lr, "weight_decay": adamw.weight_decay}
                | {"betas": adamw.betas, "eps": adamw.eps}
            )
        super().__init__(groups, {"eps": eps})
        self._make_state()

    def _make_state(self) -> None:
        # At once and in fp32: bf16-true would make it bf16 later. Counters stay on the CPU, so that
        # reading one never waits for a GPU. Row moments are of all rows on every rank: they are
        # small, and directions are needed whole, by the probe and by the engine.
        for param in self.param_groups[0]["params"]:
            held = local(param)
            state = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "row_moment": torch.zeros(param.shape[0], dtype=torch.float32, device=held.device),
            }
            if param.dtype == torch.bfloat16:
                state["residual"] = torch.zeros_like(held, dtype=torch.int16)
            self.state[param] = state
        for group in self.param_groups[1:]:
            for param in group["params"]:
                self.state[param] = adamw_state(param)

    @torch.no_grad()
    def propose(self) -> Proposal:
        """The proposal for the sketches as they stand; the same one until `step` commits it."""
        if self.proposal is None:
            with full_precision(self.sketches.flat.device):
                self.proposal = self._propose()
        return self.proposal

    def _propose(self) -> Proposal:
        squares = {s.name: _row_squares(s) for s in self.sketches}
        grad_norm, problem = self._grad_norm(squares)
        if problem:
            return Proposal({}, {}, 0.0, grad_norm, problem)
        clip = self._clip(grad_norm)
        moments, roots, usual = {}, {}, 0.0
        group = self.param_groups[0]
        for layer in self.sketches:
            state = self.state[layer.module.weight]
            mean_square = squares[layer.name] * (clip**2 / self.sketches.rank)
            moment = state["row_moment"].to(torch.float64)
            if state["step"] > 0:
                corrected = moment.sum().item() / (1 - group["beta2"] ** state["step"].item())
                usual += corrected * self.sketches.rank
            moment = moment * group["beta2"] + mean_square * (1 - group["beta2"])
            moments[layer.name] = moment.to(torch.float32)
            correction = 1 - group["beta2"] ** (state["step"].item() + 1)
            roots[layer.name] = (moment / correction).sqrt()
        row_scales = self._row_scales(squares, roots, clip)
        decay_rate = group["lr"] * group["weight_decay"]
        return Proposal(row_scales, moments, decay_rate, grad_norm, usual_norm=math.sqrt(usual))

    def _row_scales(
        self, squares: dict[str, Tensor], roots: dict[str, Tensor], clip: float
    ) -> dict[str, Tensor]:
        """Name to c [d] fp64 with `D = c * S`; squares are of the rows of S before clipping."""
        group = self.param_groups[0]
        return {name: clip * group["lr"] / (root + group["eps"]) for name, root in roots.items()}

    def _grad_norm(self, squares: dict[str, Tensor]) -> tuple[float, str]:
        """Norm of the whole gradient, and which part of it is not finite."""
        dense = [p for g in self.param_groups[1:] for p in g["params"] if p.grad is not None]
        names = [*squares, *(self._names[p] for p in dense)]
        totals = torch.stack([square.sum() for square in squares.values()]).tolist()
        totals += squared_norms([p.grad for p in dense])
        bad = [name for name, x in zip(names, totals, strict=True) if not math.isfinite(x)]
        if bad:
            return math.nan, (
                f"the gradient is not finite in {len(bad)} of {len(names)} weights, first in "
                f"{bad[0]!r}"
            )
        return math.sqrt(sum(totals)), ""

    def _clip(self, grad_norm: float) -> float:
        if self.max_grad_norm is None or grad_norm <= self.max_grad_norm:
            return 1.0
        return self.max_grad_norm / grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Propose, call the closure, commit `step_scale` times the proposal.

        The closure runs before the commit: Lightning fires `on_before_optimizer_step` inside it,
        where callbacks may read the proposal and set `step_scale`. A gradient that is zero
        everywhere changes nothing, row moments included; nor does a step that is skipped or
        rejected.

        Raises:
            FloatingPointError: more than `max_skipped_steps` in a row were skipped.
        """
        self.factors = None
        result = None
        try:
            proposal = self.propose()
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            committed = self._is_committed(proposal)
        finally:
            self.proposal = None
            self._skip_reason, self._rejected = "", False
        self.is_committing = True
        self.factors = self._merge(proposal if committed else None)
        if committed:
            for group in self.param_groups[1:]:
                adamw_step_(group, self.state, self._clip(proposal.grad_norm))
        self.is_committing = False
        self.last_step_scale = self.step_scale if committed else 0.0
        self.step_scale = 1.0
        return result

    def skip(self, reason: str) -> None:
        """Let the pending step change nothing, because something is not finite.

        Args:
            reason: what and where, for the warning.
        """
        self._skip_reason = reason

    def reject(self) -> None:
        """Let the pending step change nothing, because it would go too far."""
        self._rejected = True

    def _is_committed(self, proposal: Proposal) -> bool:
        reason = proposal.problem or self._skip_reason
        if not reason:
            self._skipped_in_a_row = 0
            self.rejected_steps += self._rejected
            return not (proposal.is_zero or self._rejected)
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        what = f"step {self.sketches.step}: {reason}; nothing was updated"
        if self._skipped_in_a_row > self.max_skipped_steps:
            raise FloatingPointError(
                f"{what}, in {self._skipped_in_a_row} steps in a row "
                f"(max_skipped_steps={self.max_skipped_steps})"
            )
        warnings.warn(what, stacklevel=2)
        return False

    def _merge(self, proposal: Proposal | None) -> Factors:
        sketches = self.sketches
        directions = {}
        decay = 1.0 - self.step_scale * proposal.decay_rate if proposal else 1.0
        for layer in sketches if proposal else ():
            assert proposal is not None
            param = layer.module.weight
            state = self.state[param]
            # Rounded before the merge, so that engines can do exactly the same with what they get.
            direction = proposal.rounded_direction(layer, self.step_scale)
            rows = held_rows(param)
            merge_(
                local(param),
                direction[rows],
                layer.entries,
                decay=decay,
                residual=state.get("residual"),
                origin=(rows.start, 0),
                shape=(param.shape[0], param.shape[1]),
            )
            state["row_moment"].copy_(proposal.row_moments[layer.name])
            state["step"] += 1
            directions[layer.name] = direction
        assert sketches.step is not None
        return Factors(
            sketches.step, sketches.seed, sketches.draw, sketches.projection, decay, directions
        )

    def take_factors(self) -> Factors | None:
        """What the last step merged, given away once; None before the first step."""
        factors, self.factors = self.factors, None
        return factors

    def sketched_names(self) -> dict[Tensor, str]:
        """Each sketched weight to the name that fixes its projection."""
        return {layer.module.weight: layer.name for layer in self.sketches}

    def residual(self, weight: Tensor) -> Tensor | None:
        """[held, k] int16, what a sketched bf16 weight lacks of its fp32 master; None for fp32."""
        return self.state.get(weight, {}).get("residual")

    def state_dict(self) -> dict[str, Any]:
        """All state by the names of parameters; of sharded weights all rows, on rank 0 alone.

        Every rank must call it. The names and shapes are the same whatever the number of ranks, so
        any strategy can load it.
        """
        return {
            "state": {
                self._names[param]: {key: _saved(param, value) for key, value in state.items()}
                for param, state in self.state.items()
            },
            "param_groups": [
                group | {"params": [self._names[param] for param in group["params"]]}
                for group in self.param_groups
            ],
            "sketch": self._settings(),
            "counts": [self.skipped_steps, self.rejected_steps, self._skipped_in_a_row],
        }

    def _settings(self) -> dict[str, Any]:
        sketches = self.sketches
        return {
            "rule": type(self).__name__,
            "masters": "bf16 and a residual" if self._has_residuals() else "fp32",
            "rank": sketches.rank,
            "projection_seed": sketches.seed,
            "projection": sketches.projection,
        }

    def _has_residuals(self) -> bool:
        return any("residual" in self.state[param] for param in self.param_groups[0]["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State as saved, dtypes included; of a sharded weight the rows that are held.

        Hyper-parameters stay as they are now; a learning rate keeps what a scheduler has made of
        it so far.

        Raises:
            ValueError: the checkpoint is of another optimizer, other sketches or other weights.
        """
        saved, own = state_dict.get("sketch"), self._settings()
        if saved != own:
            raise ValueError(
                f"the checkpoint's optimizer was made with {saved or 'no sketches'}, this one with "
                f"{own}: resume with the same strategy, optimizer and precision"
            )
        states = state_dict["state"]
        self._check_names(states)
        for param, state in self.state.items():
            for key, value in states[self._names[param]].items():
                has_rows = is_sharded(param) and value.shape == param.shape
                held = value[held_rows(param)] if has_rows else value
                state[key] = held.detach().to(state[key].device, copy=True)
        labels = ("model.optimizer", "model.adamw")
        for label, group, other in zip(
            labels, self.param_groups, state_dict["param_groups"], strict=False
        ):
            changed = go_on_with(group, other)
            self.overruled |= {f"{label} {name}": values for name, values in changed.items()}
        self.skipped_steps, self.rejected_steps, self._skipped_in_a_row = state_dict["counts"]
        self.proposal = None

    def _check_names(self, states: dict[str, Any]) -> None:
        own = {self._names[param] for param in self.state}
        if lacking := sorted(own - set(states)):
            raise ValueError(
                f"the checkpoint has no optimizer state of {len(lacking)} weights that train now, "
                f"first {lacking[0]!r}: resume with the same model, targets and model.train_others"
            )
        if more := sorted(set(states) - own):
            raise ValueError(
                f"the checkpoint has optimizer state of {len(more)} weights that do not train now, "
                f"first {more[0]!r}: resume with the same model, targets and model.train_others"
            )


def row_adam_of(optimizers: Iterable[torch.optim.Optimizer]) -> RowAdam | None:
    """The `RowAdam` among them, if there is one."""
    return next((o for o in optimizers if isinstance(o, RowAdam)), None)


def _saved(param: Tensor, value: Tensor) -> Tensor:
    """What a checkpoint holds of a value of the state: all rows of what is sharded."""
    if not is_sharded(param) or value.dim() < param.dim():
        return value
    return on_first_process(whole(param, value))


def _row_squares(layer: SketchedLayer) -> Tensor:
    """`sum_r S^2` [d] fp64."""
    rows = torch.linalg.vector_norm(layer.total, dim=1, dtype=torch.float32)
    return rows.to(torch.float64).square() * layer.scale**2
