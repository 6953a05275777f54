"""`RowAdam`: one optimizer for sketched and dense weights (rows 3, 4 and 8 of docs/method.md).

A step has two halves. `propose` turns the sketches into a `Proposal` and changes nothing that
lasts; `step` commits it. Between them a callback may look at the proposal, set its scale or call it
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from logra_lightning.distributed.sharding import held_rows, local
from logra_lightning.optim.adamw import AdamWOptions, adamw_state, adamw_step_
from logra_lightning.optim.grad_norm import clip_factor, whole_norm
from logra_lightning.optim.proposal import Proposal
from logra_lightning.optim.row_moments import next_moments, row_state
from logra_lightning.optim.state import (
    NamedParameters,
    check_settings,
    load_groups_,
    load_states_,
    names_in_order,
    parameter_names,
    partition,
    saved_groups,
    saved_states,
    settings_of,
)
from logra_lightning.optim.step_counts import StepCounts
from logra_lightning.sketch.bank import SketchBank, SketchedLayer
from logra_lightning.sketch.factors import Factors
from logra_lightning.sketch.merge import merge_
from logra_lightning.sketch.precision import full_precision


class RowAdam(torch.optim.Optimizer):
    r"""Adam on sketches, with one second moment per row of a weight and no first moment.

    .. math::
        v \leftarrow \beta_2 v + (1 - \beta_2)\, \mathrm{mean}_r(S^2), \qquad
        D = \mathrm{lr} \cdot S / (\sqrt{v / (1 - \beta_2^t)} + \epsilon), \qquad
        W \leftarrow (1 - a\,\mathrm{lr}\,\lambda)\, W - a\, D A

    with step scale a and weight decay :math:`\lambda`. A learning-rate scheduler may change `lr`.
    The paper's rule for D is `RelativeRowAdam`.

    AdamW trains all other weights that require a gradient, in the same step. Weights are fp32 or
    bf16; a bf16 weight has an exact fp32 master, by a residual if it is sketched
    (`logra_lightning.sketch.master`), else as a copy.

    Weights may be sharded by rows (`logra_lightning.distributed.sharding`). Each process then
    updates the rows that it holds; every process has the sketches of all rows.

    Source: LoGRA, arXiv 2610.06647.

    Args:
        params: all parameters of the model, best as `model.named_parameters()`: checkpoints hold
            their state by name. One that is neither sketched nor requires a gradient is left alone.
        sketches: the sketches, which the strategy has as `trainer.strategy.sketches`.
        adamw: options for the weights that are not sketched.
        max_grad_norm: clip the norm of the whole gradient, sketched and dense, to this value;
            None does not clip.
        max_skipped_steps: number of steps in a row that may be skipped before the run stops. A step
            is skipped when a gradient is not finite or a callback calls `Proposal.skip`. Of steps
            that a callback rejects, 20 in a row may be.
        lr: learning rate of the sketched weights.
        beta2: decay of the row moments.
        eps: added to the root of a row moment.
        weight_decay: decoupled weight decay of the sketched weights.

    Attributes:
        proposal: the proposal of the pending step, None where `propose` has not been called.
        last_step_scale: step scale of the last step, 0 if it changed nothing.
        factors: what the last step merged into the sketched weights; see `take_factors`.
        is_committing: whether a step has updated some weights and not yet all of them.
        counts: how many steps were committed, skipped and rejected so far.
        overruled: options that differ from those in the loaded checkpoint and hold instead of
            them: name to the value in the checkpoint and the value now.

    Raises:
        ValueError: a value is out of range, or a sketched weight is not among `params`.
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
        self.counts = StepCounts(max_skipped_steps)
        self.is_committing = False
        self.last_step_scale = 0.0
        self.proposal: Proposal | None = None
        self.factors: Factors | None = None
        self.overruled: dict[str, tuple[object, object]] = {}
        self._names = parameter_names(params, sketches)
        self._order = names_in_order(self._names, sketches)
        sketched, dense = partition(self._names, sketches)
        groups: list[dict[str, Any]] = [
            {"params": sketched, "lr": lr, "beta2": beta2, "weight_decay": weight_decay}
        ]
        if dense:
            groups.append({"params": dense} | (adamw or AdamWOptions()).of_group())
        super().__init__(groups, {"eps": eps})
        # Made now and in fp32: what is made later Lightning's bf16-true would make in bf16.
        for param in sketched:
            self.state[param] = row_state(param)
        for param in dense:
            self.state[param] = adamw_state(param)

    @torch.no_grad()
    def propose(self) -> Proposal:
        """The proposal for the sketches as they are; the same one until `step` has ended it."""
        if self.proposal is None:
            with full_precision(self.sketches.flat.device):
                self.proposal = self._propose()
        return self.proposal

    def _propose(self) -> Proposal:
        squares = {layer.name: layer.row_squares() for layer in self.sketches}
        dense = [p for g in self.param_groups[1:] for p in g["params"] if p.grad is not None]
        gradients = {self._names[p]: p.grad for p in dense}
        grad_norm, problem = whole_norm(squares, gradients, self._order)
        if problem:
            return Proposal({}, {}, 0.0, grad_norm, problem)
        group, clip = self.param_groups[0], clip_factor(grad_norm, self.max_grad_norm)
        moments, roots, usual_norm = next_moments(
            self.sketches, self.state, squares, clip=clip, beta2=group["beta2"]
        )
        row_scales = self._row_scales(squares, roots, clip)
        decay_rate = group["lr"] * group["weight_decay"]
        return Proposal(row_scales, moments, decay_rate, grad_norm, usual_norm=usual_norm)

    def _row_scales(
        self, squares: dict[str, Tensor], roots: dict[str, Tensor], clip: float
    ) -> dict[str, Tensor]:
        """Name of a layer to c [d] fp64, where `D = c * S`.

        Args:
            squares: name to squared norms of the rows of S [d] fp64, before clipping.
            roots: name to roots of the corrected row moments [d] fp64.
            clip: factor by which clipping multiplies S.
        """
        group = self.param_groups[0]
        return {name: clip * group["lr"] / (root + group["eps"]) for name, root in roots.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the proposal if there is none, call the closure, then commit what it left.

        Lightning calls `on_before_optimizer_step` inside the closure, where callbacks may change
        the proposal. `Proposal` says when a step changes nothing.

        Returns:
            What the closure returned, None without one.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row were skipped.
            RuntimeError: more than 20 steps in a row were rejected.
        """
        self.factors = None
        result, own = None, self.sketches
        assert own.step is not None
        try:
            proposal = self.propose()
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self.counts.count(own.step, proposal, self.param_groups[0]["beta2"])
        finally:
            self.proposal = None
        decay, directions = 1.0, {}
        if proposal.is_committed:
            decay -= proposal.scale * proposal.decay_rate
            self.is_committing = True
            directions = self._merge_(proposal, decay)
            clip = clip_factor(proposal.grad_norm, self.max_grad_norm)
            for group in self.param_groups[1:]:
                adamw_step_(group, self.state, clip)
            self.is_committing = False
        elif proposal.decays_moments:
            for layer in own:
                self._next_moments_(layer, proposal)
        self.last_step_scale = proposal.scale if proposal.is_committed else 0.0
        self.factors = Factors(own.step, own.seed, own.draw, own.projection, decay, directions)
        return result

    def _merge_(self, proposal: Proposal, decay: float) -> dict[str, Tensor]:
        """Update the sketched weights and their state; name to the direction that was merged."""
        directions = {}
        for layer in self.sketches:
            param = layer.module.weight
            state = self.state[param]
            # Rounded before the merge, so that engines, which get it rounded, merge the same.
            direction = proposal.rounded_direction(layer, proposal.scale)
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
            self._next_moments_(layer, proposal)
            directions[layer.name] = direction
        return directions

    def _next_moments_(self, layer: SketchedLayer, proposal: Proposal) -> None:
        state = self.state[layer.module.weight]
        state["row_moment"].copy_(proposal.row_moments[layer.name])
        state["step"] += 1

    def take_factors(self) -> Factors | None:
        """What the last step merged, once; None before the first step and when called again."""
        factors, self.factors = self.factors, None
        return factors

    def sketched_names(self) -> dict[Tensor, str]:
        """Each sketched weight to the name of its layer, by which its projection is made."""
        return {layer.module.weight: layer.name for layer in self.sketches}

    def residual(self, weight: Tensor) -> Tensor | None:
        """[held rows, k] int16, the low half of the master of a sketched bf16 weight, else None."""
        return self.state.get(weight, {}).get("residual")

    def state_dict(self) -> dict[str, Any]:
        """All state by the names of parameters; every process must call it.

        The first process gets all rows of sharded weights, the others none of them. Any strategy
        with any number of processes can load it.
        """
        return {
            "state": saved_states(self.state, self._names),
            "param_groups": saved_groups(self.param_groups, self._names),
            "sketch": settings_of(self, self.sketches),
            "counts": self.counts.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; options such as `lr` stay those of this run.

        A learning rate takes over only what a scheduler had made of it, see `go_on_with`.

        Raises:
            ValueError: the checkpoint is of another optimizer, other sketches or other weights.
        """
        check_settings(settings_of(self, self.sketches), state_dict.get("sketch"))
        load_states_(self.state, self._names, state_dict["state"])
        labels = ("model.optimizer", "model.adamw")
        self.overruled |= load_groups_(self.param_groups, state_dict["param_groups"], labels)
        # In 0.1.0 moments moved in committed steps alone, and nothing else counted these.
        self.counts.updates = int(self.state[self.param_groups[0]["params"][0]]["step"])
        self.counts.load_state_dict(state_dict["counts"])
        self.proposal = None


# Makes the optimizer from all parameters, the sketches, AdamW's options and `max_grad_norm`.
OptimizerFactory = Callable[[NamedParameters, SketchBank, AdamWOptions, float | None], RowAdam]


def row_adam_of(optimizers: Iterable[torch.optim.Optimizer]) -> RowAdam | None:
    """The first `RowAdam` among the optimizers, None where there is none."""
    return next((o for o in optimizers if isinstance(o, RowAdam)), None)
