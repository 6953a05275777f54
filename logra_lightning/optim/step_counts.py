"""`StepCounts`: counts what became of steps, and tells when many in a row change nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from logra_lightning.optim.proposal import ROUNDING, Proposal

MAX_REJECTED_STEPS = 20  # in a row; one more ends the run
_TOLD_REJECTED, _TOLD_TINY = 3, 5  # in a row, when it is told
_SAVED = (
    "skipped_steps",
    "rejected_steps",
    "skipped_in_a_row",
    "updates",
    "rejected_in_a_row",
    "tiny_in_a_row",
)


def _nowhere() -> str:
    return ""


@dataclass
class StepCounts:
    """How many steps were committed, skipped and rejected; the optimizer counts each once.

    Rows of steps are counted too. A step whose gradient is exactly zero says nothing about the
    others, so it neither ends a row nor belongs to one. Of the other steps, each one that is not
    skipped ends a row of skipped ones; one that is rejected or committed ends a row of tiny
    gradients; and only a commit ends a row of rejected ones.

    Attributes:
        max_skipped_steps: number of steps in a row that may be skipped before the run ends.
        updates: number of steps that committed an update.
        skipped_steps: number of steps that were skipped because something was not finite.
        rejected_steps: number of steps that were rejected because they would go too far.
        skipped_in_a_row: length of the present row of skipped steps.
        rejected_in_a_row: length of the present row of rejected steps.
        tiny_in_a_row: length of the present row of steps whose gradient was only rounding.
        first_not_finite: runs the forward pass again and returns the name of the first module whose
            output is not finite, or an empty string; called where a gradient is not finite.
    """

    max_skipped_steps: int = 3
    updates: int = 0
    skipped_steps: int = 0
    rejected_steps: int = 0
    skipped_in_a_row: int = 0
    rejected_in_a_row: int = 0
    tiny_in_a_row: int = 0
    first_not_finite: Callable[[], str] = _nowhere

    def count(self, step: int, proposal: Proposal, beta2: float) -> None:
        """Count a step by what its proposal says.

        Args:
            step: number of the step, from 0, for messages.
            proposal: the step.
            beta2: decay of the row moments.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row were skipped.
            RuntimeError: more than 20 steps in a row were rejected.
        """
        if proposal.problem:
            self.skip(step, proposal.problem, in_gradient=not math.isfinite(proposal.grad_norm))
        elif proposal.is_rejected:
            self._reject(step, proposal.rejection)
        elif proposal.decays_moments:
            self._pass_over(step, proposal, beta2)
        elif proposal.is_committed:
            self.commit()

    def commit(self) -> None:
        """Count a step that changes weights."""
        self.updates += 1
        self.skipped_in_a_row = self.rejected_in_a_row = self.tiny_in_a_row = 0

    def skip(self, step: int, problem: str, *, in_gradient: bool) -> None:
        """Count a step that is skipped, and warn.

        Args:
            step: number of the step, from 0.
            problem: what is not finite and where.
            in_gradient: whether that is the gradient; then the forward pass is searched too.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row were skipped.
        """
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        module = self.first_not_finite() if in_gradient else ""
        cause = f", because the output of {module!r} is not finite" if module else ""
        what = f"step {step}: {problem}{cause}; nothing was updated"
        if self.skipped_in_a_row > self.max_skipped_steps:
            raise FloatingPointError(
                f"{what}, in {self.skipped_in_a_row} steps in a row "
                f"(max_skipped_steps={self.max_skipped_steps})"
            )
        warnings.warn(what, stacklevel=2)

    def _reject(self, step: int, reason: str) -> None:
        self.skipped_in_a_row = self.tiny_in_a_row = 0
        self.rejected_steps += 1
        self.rejected_in_a_row += 1
        what = f"step {step}: {self.rejected_in_a_row} updates in a row were rejected"
        reason = f"; {reason}" if reason else ""
        if self.rejected_in_a_row > MAX_REJECTED_STEPS:
            raise RuntimeError(f"{what}, more than the {MAX_REJECTED_STEPS} that may be{reason}")
        if self.rejected_in_a_row == _TOLD_REJECTED:
            warnings.warn(f"{what}{reason}", stacklevel=2)

    def _pass_over(self, step: int, proposal: Proposal, beta2: float) -> None:
        """Count a step whose gradient is only rounding, as far as the usual norm tells."""
        self.skipped_in_a_row = 0
        self.tiny_in_a_row += 1
        if self.tiny_in_a_row == _TOLD_TINY:
            norm, usual = proposal.grad_norm, proposal.usual_norm
            warnings.warn(
                f"step {step}: the norm of the gradient, {norm:.1e}, is below {ROUNDING:.0e} of "
                f"the usual one, {usual:.1e}, in {_TOLD_TINY} steps in a row, so nothing was "
                f"updated. At this norm it trains again after at most "
                f"{steps_until_usual(norm, usual, beta2)} more steps; a lower model.max_grad_norm "
                f"bounds what one large gradient does to the usual norm",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, saved: Mapping[str, int] | list[int]) -> None:
        """Go on with the counts of a checkpoint; 0.1.0 saved a list of the first three."""
        if isinstance(saved, list):
            saved = dict(zip(_SAVED, saved, strict=False))
        for name, value in saved.items():
            setattr(self, name, value)


def steps_until_usual(grad_norm: float, usual_norm: float, beta2: float) -> int:
    """How many steps pass at most until a gradient of this norm trains again.

    With each step the usual norm falls to sqrt(beta2) of it, or below. With beta2 .95, a norm of 1
    and a usual norm of 2e5, it is below 1e5 after ln(2) / -ln(sqrt(.95)) = 27.03 steps, so 28.
    """
    too_small = ROUNDING * usual_norm / grad_norm
    if too_small < 1 or beta2 == 0:
        return 1
    return math.floor(2 * math.log(too_small) / -math.log(beta2)) + 1
