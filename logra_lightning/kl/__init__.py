"""What a step costs: the KL change that it makes in the policy, predicted, measured, budgeted."""

from logra_lightning.kl.kl_probe import KLProbe

__all__ = ["KLProbe"]
