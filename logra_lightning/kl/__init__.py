"""What a step costs: the KL change that it makes in the policy, predicted, measured, budgeted."""

from logra_lightning.kl.kl_probe import KLProbe, first_not_finite

__all__ = ["KLProbe", "first_not_finite"]
