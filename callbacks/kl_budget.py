"""`KLBudget`: scales each step so that its KL stays within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from logra_lightning.callbacks.weight_sync import WeightSync
from logra_lightning.kl.budget import (
    MismatchAverage,
    Schedule,
    predicted_scale,
    shrink_until_within,
)
from logra_lightning.kl.float32_weights import exact_forwards
from logra_lightning.kl.kl_probe import KLProbe, first_not_finite
from logra_lightning.kl.step_kl import DifferenceKL, StepKL, TangentKL
from logra_lightning.optim.proposal import Proposal
from logra_lightning.optim.row_adam import RowAdam, row_adam_of

Method = Literal["forward_ad", "fp32", "finite_difference"]


class HasKLProbe(Protocol):
    """What `KLBudget` needs of a `LightningModule`."""

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """Completion tokens of `num_rollouts` of the step's rollouts, cut off at `max_tokens`."""
        ...


class KLBudget(Callback):
    r"""Scales each step so that the policy changes by no more than a KL budget.

    Before the weights change, the KL of the update is predicted on a few rollouts: a step of scale
    a costs a^2 q nats per completion token. The step scale becomes
    :math:`\min(\mathrm{max\_scale}, \sqrt{\mathrm{budget} / q})`. Then the KL of that very update
    is measured, still without changing a weight. If it is above `tolerance` times the budget, the
    scale is shrunk and the KL measured again, up to `max_backtracks` times; if that is not enough
    the update is rejected and the step changes nothing. After three rejected updates in a row there
    is a warning, and after more than 20 the run ends. A KL that is not finite skips the step. Both
    KLs are taken in the precision of training; with a bf16 policy by derivatives, which see an
    update however small it is.

    The budget covers the sketched weights, not what AdamW trains beside them. With another
    optimizer than `RowAdam` the callback is inactive and says so once. The module needs a method
    `kl_probe`, see `HasKLProbe`.

    Logs at every step, in nats per completion token, `kl/budget`, `kl/predicted` and `kl/measured`;
    `kl/ratio` (measured over predicted), `kl/backtracks` (how many times the scale was shrunk) and
    `time/kl_s` (seconds, a part of `time/update_s`). With a bf16 policy it also logs, every
    `bf16_every` steps, `kl/measured_bf16`: the KL of the update as two bf16 forward passes show
    it, most of which is rounding where the update is small.

    Args:
        start: KL budget of the first update, in nats per completion token.
        end: KL budget of the last update of the schedule and of all after it, in nats per
            completion token.
        steps: number of updates in which the budget goes from `start` to `end`. A step that changes
            nothing (no signal, skipped, rejected) does not count.
        schedule: how the budget goes from `start` to `end`: `cosine` or `linear`. With `constant`
            it stays at `start`.
        max_scale: largest step scale. An update is never longer than this many times what the
            optimizer proposes, however small its predicted KL.
        probe_rollouts: number of rollouts of the batch, in each process, on which the KL is
            predicted and measured.
        probe_max_tokens: number of tokens of prompt and completion together after which a
            completion is cut off for the probe. Prompts are never cut. Memory of the probe grows
            with the square of this length, since it uses plain attention.
        mismatch_subtraction: lower the budget of each step by the average mismatch between the
            logprobs of engine and trainer, but to no less than half of it.
        mismatch_weight: weight of the newest step in the moving average of the mismatch that
            `mismatch_subtraction` uses, above 0 and at most 1.
        backtrack: shrink or reject an update whose measured KL is too large. If false, such an
            update is made all the same.
        tolerance: an update whose measured KL is above this many times the budget is shrunk and
            measured again.
        max_backtracks: an update that was shrunk this many times and is still above the tolerance
            is rejected: the step changes nothing.
        method: how the KL is taken. `forward_ad`: by derivatives in the policy's own dtype.
            `fp32`: in fp32 with the exact masters, whatever the precision of training, to check
            the other against; slow on a GPU. `finite_difference`: in fp32 too, by differences of
            forward passes, for models with an operation that has no forward-mode derivative.
        bf16_every: with a bf16 policy, log every this many steps how much of an update two bf16
            forward passes show; 0 never does.

    Raises:
        ValueError: a value is out of range, or `KLBudget` stands after `WeightSync` in the list of
            callbacks.
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
        method: Method = "forward_ad",
        bf16_every: int = 10,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(
                f"kl_budget.method must be one of {', '.join(get_args(Method))}, got {method!r}"
            )
        if not max_scale > 0 or not tolerance >= 1:
            raise ValueError(
                f"kl_budget needs max_scale > 0 and tolerance >= 1, got {max_scale} and {tolerance}"
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
        self.backtrack = backtrack
        self.tolerance = tolerance
        self.max_backtracks = max_backtracks
        self.method = method
        self.bf16_every = bf16_every
        self._mismatch = MismatchAverage(mismatch_weight)

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
        budget = self.budget(optimizer.counts.updates)
        proposal = optimizer.propose()
        if proposal.problem or proposal.is_zero:
            cost = math.nan if proposal.problem else 0.0
            self._log(pl_module, budget, cost, cost, 0)
            return
        module: Any = pl_module
        probe: KLProbe = module.kl_probe(self.probe_rollouts, self.probe_max_tokens)
        started = time.perf_counter()
        if self.mismatch_subtraction:
            budget = self._mismatch.subtracted_from(budget, probe.mismatch)
        step, precision = self._step_kl(trainer, probe, proposal, optimizer)
        with precision:
            q = step.predict()
            if not 0 <= q < math.inf:
                where = first_not_finite(probe.model, probe.hidden)
                proposal.skip(f"the predicted KL is {q}{f', from {where!r} on' if where else ''}")
                self._log(pl_module, budget, math.nan, math.nan, 0)
                return
            scale, measured, backtracks = shrink_until_within(
                step.measure,
                predicted_scale(q, budget, self.max_scale),
                budget,
                tolerance=self.tolerance,
                max_backtracks=self.max_backtracks if self.backtrack else 0,
            )
        if not math.isfinite(measured):
            proposal.skip(f"the KL of the update is {measured}, from its logits")
        elif self.backtrack and measured > self.tolerance * budget:
            proposal.reject(
                f"a KL of {measured:.1e} nats per token is above kl_budget.tolerance="
                f"{self.tolerance} times the budget of {budget:.1e}: raise kl_budget.tolerance or "
                f"kl_budget.max_backtracks, or lower kl_budget.start"
            )
        else:
            proposal.scale = scale
            self._mismatch.add(probe.mismatch)
        self._log(pl_module, budget, scale * scale * q, measured, backtracks)
        pl_module.log("time/kl_s", time.perf_counter() - started)
        if self.bf16_every and trainer.global_step % self.bf16_every == 0:
            self._look_in_bf16(trainer, step, scale)

    def _log(
        self,
        pl_module: LightningModule,
        budget: float,
        predicted: float,
        measured: float,
        backtracks: int,
    ) -> None:
        """Log everything at every step: of a value left out Lightning would show the last one."""
        pl_module.log("kl/budget", budget)
        pl_module.log("kl/predicted", predicted)
        pl_module.log("kl/measured", measured)
        pl_module.log("kl/ratio", measured / predicted if predicted > 0 else math.nan)
        pl_module.log("kl/backtracks", float(backtracks))

    def state_dict(self) -> dict[str, Any]:
        return {"mismatch": self._mismatch.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._mismatch.value = state_dict["mismatch"]

    def _step_kl(
        self, trainer: Trainer, probe: KLProbe, proposal: Proposal, optimizer: RowAdam
    ) -> tuple[StepKL, AbstractContextManager[None]]:
        """What takes the KL of the step, and the precision to call it in."""
        sketches = optimizer.sketches
        weights = (layer.module.weight for layer in sketches)
        is_fp32 = trainer.precision == "32-true" and all(w.dtype == torch.float32 for w in weights)
        if self.method == "forward_ad" and not is_fp32:
            forward_context = trainer.precision_plugin.forward_context
            return TangentKL(probe, proposal, sketches), _as_it_trains(probe, forward_context)
        kind = DifferenceKL if self.method == "finite_difference" else StepKL
        return kind(probe, proposal, sketches), exact_forwards(probe, optimizer.residual)

    def _look_in_bf16(self, trainer: Trainer, step: StepKL, scale: float) -> None:
        """Log how much of the update two forward passes of a bf16 policy show."""
        if trainer.precision not in ("bf16-true", "bf16-mixed"):
            return
        seen = step.measure_within(trainer.precision_plugin.forward_context, scale)
        for logger in trainer.loggers:  # `log` would repeat it at the steps between
            logger.log_metrics({"kl/measured_bf16": seen}, step=trainer.global_step + 1)


@contextmanager
def _as_it_trains(
    probe: KLProbe, forward_context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with probe.prepared(), forward_context():
        yield
