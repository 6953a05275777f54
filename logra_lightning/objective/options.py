"""`ObjectiveOptions`: the options of the objective, as a user sets them."""

from __future__ import annotations

from dataclasses import dataclass

from logra_lightning.objective.advantage import Advantage
from logra_lightning.objective.correction import Correction, TokenTruncation
from logra_lightning.objective.loss import Loss, PPOClip
from logra_lightning.objective.normalizer import Normalizer
from logra_lightning.objective.objective import Objective
from logra_lightning.objective.reference_kl import ReferenceKL


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is optimized: how rewards become advantages, and advantages a loss.

    Args:
        advantage: turns the rewards of a batch into advantages; `GRPO` when left out.
        loss: the loss of a token; `PPOClip` when left out.
        normalizer: how much a token counts in the step's loss; `TokenMean` when left out.
        correction: weighs tokens that the engine sampled with other probabilities than the policy
            has; `TokenTruncation` at 2 when left out, `NoCorrection` for none.
        reference_kl: adds a KL to the policy of the start to the loss; null adds none.
        entropy_coefficient: how strongly the loss rewards entropy; 0 does not.
        mask_truncated: do not train on completions that were cut off; their rewards still count
            in the advantages of their group.
    """

    advantage: Advantage | None = None
    loss: Loss | None = None
    normalizer: Normalizer | None = None
    correction: Correction | None = None
    reference_kl: ReferenceKL | None = None
    entropy_coefficient: float = 0.0
    mask_truncated: bool = False

    def objective(self) -> Objective:
        """The loss of a microbatch with these options."""
        return Objective(
            self.loss or PPOClip(),
            self.correction or TokenTruncation(),
            self.reference_kl,
            self.entropy_coefficient,
        )
