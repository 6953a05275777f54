"""What a step costs: its KL change in the policy, predicted before it is taken, and measured."""

from logra_lightning.kl.predicted_kl import KLProbe

__all__ = ["KLProbe"]
