"""`KLBudget`: scales each step to a KL budget that is predicted, measured and annealed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from logra_lightning.callbacks.weight_sync import WeightSync
from logra_lightning.distributed.processes import of_all_processes, sum_over_processes_
from logra_lightning.kl import KLProbe
from logra_lightning.kl.inject import float32_weights
from logra_lightning.kl.predicted_kl import first_not_finite
from logra_lightning.kl.step_kl import StepKL
from logra_lightning.optim import RowAdam
from logra_lightning.optim.row_adam import row_adam_of
from logra_lightning.sketch.precision import full_precision

_SHRINK = 0.5  # at least by this, at each try


class HasKLProbe(Protocol):
    """What `KLBudget` asks of a `LightningModule`."""

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """Completion tokens of the pending step, see `KLProbe`."""
        ...


@dataclass(frozen=True)
class Schedule:
    """The budget of each update, a pure function of its number.

    Args:
        start: nats per completion token at the first update.
        end: at update `steps` and after it.
        steps: updates over which it is annealed.
        shape: `cosine`, `linear` or `constant` (always `start`).
    """

    start: float
    end: float
    steps: int
    shape: Literal["cosine", "linear", "constant"]

    def __call__(self, update: int) -> float:
        """The budget of update number `update`, counted from 0, in nats per completion token."""
        if self.shape == "constant":
            return self.start
        done = min(1.0, update / (self.steps - 1)) if self.steps > 1 else 1.0
        left = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.end + (self.start - self.end) * left


class KLBudget(Callback):
    r"""Makes a step as long as its KL budget allows.

    Before each update its KL change in the policy is predicted on a few rollouts, a^2 q for a step
    of scale a, and the scale set to :math:`\min(\mathrm{max\_scale}, \sqrt{\mathrm{budget} / q})`.
    Then the KL of that very update is measured, still without changing a weight; above `tolerance`
    times the budget the scale shrinks and is measured again, and after four tries the update is
    rejected. Both are computed in fp32, also of a bf16 policy. What is not finite skips the step.

    The budget covers the sketched weights, not what AdamW trains beside them. The optimizer must be
    a `RowAdam`; with another one the callback is inactive and says so once. The module has
    `kl_probe`, as `HasKLProbe` says.

    Logs, in nats per completion token, `kl/budget`, `kl/predicted`, `kl/measured`, `kl/ratio`
    (measured over predicted), `kl/backtracks`, and of a bf16 policy `kl/measured_bf16` (the update
    injected into its own forward pass) and `kl/floor_bf16` (the KL that bf16 alone makes); also
    `time/kl_s`, which is part of `time/update_s`.

    Args:
        start: budget of the first update, in nats per completion token.
        end: budget of the last one.
        steps: updates from the one to the other.
        schedule: `cosine`, `linear` or `constant`.
        max_scale: largest step scale.
        probe_rollouts: rollouts of the batch that are looked at, by each rank.
        probe_max_tokens: where a completion is cut off, counted with its prompt. Prompts are never
            cut, and memory grows with the square of the length: the probe has plain attention.
        mismatch_subtraction: subtract a moving average of the mismatch between engine and trainer
            from the budget, down to half of it.
        mismatch_weight: of the newest value in that average.
        backtrack: shrink a step whose measured KL is too large.
        tolerance: times the budget, from which on it is.
        max_backtracks: tries before the update is rejected.
        method: `forward_ad` (exact), or `finite_difference` where an operation has no derivative
            in forward mode.
        bf16_every: look at what bf16 sees at every so many steps; 0 never does.

    Raises:
        ValueError: a value out of range, or a place after `WeightSync` in the list of callbacks.
    """

    def __init__(
        self,
        start: float = 2e-4,
        end: float = 2e-5,
        steps: int = 300,
        schedule: Literal["cosine", "linear", "constant"] = "cosine",
        max_scale: float = 3.0,
        probe_rollouts: int = 8,
        probe_max_tokens: int = 1024,
        mismatch_subtraction: bool = False,
        mismatch_weight: float = 0.3,
        backtrack: bool = True,
        tolerance: float = 2.0,
        max_backtracks: int = 4,
        method: Literal["forward_ad", "finite_difference"] = "forward_ad",
        bf16_every: int = 10,
    ) -> None:
        if not 0 < start < math.inf or not 0 < end < math.inf or steps < 1:
            raise ValueError(
                f"kl_budget needs start > 0, end > 0 and steps >= 1, got {start}, {end} and {steps}"
            )
        if schedule not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"kl_budget.schedule must be cosine, linear or constant, got {schedule!r}"
            )
        if method not in ("forward_ad", "finite_difference"):
            raise ValueError(
                f"kl_budget.method must be forward_ad or finite_difference, got {method!r}"
            )
        if not max_scale > 0 or not tolerance >= 1 or not 0 < mismatch_weight <= 1:
            raise ValueError(
                f"kl_budget needs max_scale > 0, tolerance >= 1 and 0 < mismatch_weight <= 1, got "
                f"{max_scale}, {tolerance} and {mismatch_weight}"
            )
        if min(probe_rollouts, probe_max_tokens) < 1 or min(max_backtracks, bf16_every) < 0:
            raise ValueError(
                f"kl_budget needs probe_rollouts and probe_max_tokens of at least 1, "
                f"max_backtracks and bf16_every not negative, got {probe_rollouts}, "
                f"{probe_max_tokens}, {max_backtracks} and {bf16_every}"
            )
        self.budget = Schedule(start, end, steps, schedule)
        self.max_scale = max_scale
        self.probe_rollouts = probe_rollouts
        self.probe_max_tokens = probe_max_tokens
        self.mismatch_subtraction = mismatch_subtraction
        self.mismatch_weight = mismatch_weight
        self.backtrack = backtrack
        self.tolerance = tolerance
        self.max_backtracks = max_backtracks
        self.method = method
        self.bf16_every = bf16_every
        self._mismatch: float | None = None
        self._told_floor = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)]
        if any(isinstance(callback, WeightSync) for callback in before):
            raise ValueError("put KLBudget before WeightSync in the Trainer's callbacks")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = row_adam_of(trainer.optimizers)
        if optimizer is None:
            rank_zero_info(
                f"KLBudget is inactive: {type(trainer.optimizers[0]).__name__} makes no proposals."
            )
            return
        if not hasattr(pl_module, "kl_probe"):
            raise ValueError(
                f"KLBudget needs {type(pl_module).__name__} to have "
                f"`kl_probe(num_rollouts, max_tokens)`, which returns a "
                f"logra_lightning.kl.KLProbe"
            )
        if len(optimizer.param_groups) > 1:
            rank_zero_info("KLBudget covers the sketched weights, not those that AdamW trains.")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                chart = ["Multiline", ["kl/budget", "kl/predicted", "kl/measured"]]
                logger.experiment.add_custom_scalars({"KL": {"nats per token": chart}})

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not isinstance(optimizer, RowAdam):
            return
        budget = self.budget(trainer.global_step)
        proposal = optimizer.propose()
        if proposal.problem or proposal.is_zero:
            cost = math.nan if proposal.problem else 0.0
            self._log(pl_module, budget, cost, cost, 0)
            return
        module: Any = pl_module
        probe: KLProbe = module.kl_probe(self.probe_rollouts, self.probe_max_tokens)
        started = time.perf_counter()
        mismatch = _mean_over_processes(probe.mismatch)
        budget = self._less_mismatch(budget, mismatch)
        with _exactly(trainer, probe, optimizer):
            step = StepKL(probe, optimizer, sum_over_processes_)
            q = step.predict(self.method)
            if not 0 <= q < math.inf:
                where = first_not_finite(probe)
                proposal.skip(f"the predicted KL is {q}{f', from {where!r} on' if where else ''}")
                self._log(pl_module, budget, math.nan, math.nan, 0)
                return
            scale = min(self.max_scale, math.sqrt(budget / q)) if q > 0 else 1.0
            scale, measured, backtracks = self._fit(step, scale, budget)
        if not math.isfinite(measured):
            proposal.skip(f"the KL of the update is {measured}, from its logits")
        elif self.backtrack and measured > self.tolerance * budget:
            proposal.reject()
        else:
            proposal.scale = scale
            self._remember(mismatch)
        self._log(pl_module, budget, scale * scale * q, measured, backtracks)
        pl_module.log("time/kl_s", time.perf_counter() - started)
        if self.bf16_every and trainer.global_step % self.bf16_every == 0:
            self._look_in_bf16(trainer, step, scale, budget)

    def _log(
        self,
        pl_module: LightningModule,
        budget: float,
        predicted: float,
        measured: float,
        backtracks: int,
    ) -> None:
        """All of them at each step: Lightning would show what is left out as it was before."""
        pl_module.log("kl/budget", budget)
        pl_module.log("kl/predicted", predicted)
        pl_module.log("kl/measured", measured)
        pl_module.log("kl/ratio", measured / predicted if predicted > 0 else math.nan)
        pl_module.log("kl/backtracks", float(backtracks))

    def _fit(self, step: StepKL, scale: float, budget: float) -> tuple[float, float, int]:
        """Step scale, its measured KL, and how often it was shrunk."""
        measured = step.measure(scale)
        backtracks = 0
        while (
            self.backtrack
            and not measured <= self.tolerance * budget
            and backtracks < self.max_backtracks
        ):
            over = math.sqrt(budget / measured) if 0 < measured < math.inf else _SHRINK
            scale *= min(_SHRINK, over)
            measured = step.measure(scale)
            backtracks += 1
        return scale, measured, backtracks

    # The mismatch between engine and trainer.

    def _less_mismatch(self, budget: float, mismatch: float | None) -> float:
        average = self._average(mismatch)
        if not self.mismatch_subtraction or average is None:
            return budget
        return max(budget / 2, budget - average)

    def _average(self, mismatch: float | None) -> float | None:
        """The moving average with the newest value."""
        if mismatch is None or not math.isfinite(mismatch):
            return self._mismatch
        newest = max(0.0, mismatch)
        if self._mismatch is None:
            return newest
        return self._mismatch + self.mismatch_weight * (newest - self._mismatch)

    def _remember(self, mismatch: float | None) -> None:
        self._mismatch = self._average(mismatch)

    def state_dict(self) -> dict[str, Any]:
        return {"mismatch": self._mismatch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._mismatch = state_dict["mismatch"]

    # What a bf16 policy sees.

    def _look_in_bf16(self, trainer: Trainer, step: StepKL, scale: float, budget: float) -> None:
        if trainer.precision not in ("bf16-true", "bf16-mixed"):
            return
        with step.probe.prepared():
            with trainer.precision_plugin.forward_context():
                old = step.probe.hidden()
                new = step.probe.hidden(step.changes(scale))
            with full_precision(trainer.strategy.root_device):
                seen, floor = step.between(old, new), step.between(step.old, old)
        values = {"kl/measured_bf16": seen, "kl/floor_bf16": floor}
        for logger in trainer.loggers:  # not at every step, which `log` cannot do
            logger.log_metrics(values, step=trainer.global_step + 1)
        if budget < floor and not self._told_floor:
            self._told_floor = True
            rank_zero_warn(
                f"the KL budget, {budget:.1e} nats per token, is below what bf16 alone makes of "
                f"the same weights, {floor:.1e}: updates are kept exactly, but rollouts and losses "
                f"see them only once they add up"
            )


@contextmanager
def _exactly(trainer: Trainer, probe: KLProbe, optimizer: RowAdam) -> Iterator[None]:
    with (
        probe.prepared(),
        full_precision(trainer.strategy.root_device),
        float32_weights(probe.model, optimizer.residual),
    ):
        yield


def _mean_over_processes(value: float | None) -> float | None:
    if value is None:
        return None
    values = of_all_processes(value)
    return sum(values) / len(values)
