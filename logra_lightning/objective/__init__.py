"""What is optimized: advantages, losses, and the logprobs of tokens."""

from logra_lightning.objective.advantage import (
    GRPO,
    RLOO,
    Advantage,
    DrGRPO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RunningBaseline,
)
from logra_lightning.objective.batch_stats import BatchStats
from logra_lightning.objective.correction import (
    Correction,
    GeometricMeanMask,
    NoCorrection,
    ProductMask,
    TokenMask,
    TokenTruncation,
)
from logra_lightning.objective.logprobs import Head, token_logprobs
from logra_lightning.objective.loss import CISPO, GSPO, Loss, PPOClip, Reinforce
from logra_lightning.objective.normalizer import (
    ConstantLength,
    Normalizer,
    SequenceMean,
    TokenMean,
)
from logra_lightning.objective.objective import Objective
from logra_lightning.objective.options import ObjectiveOptions
from logra_lightning.objective.reference_kl import K1, K2, K3, ReferenceKL

__all__ = [
    "CISPO",
    "GRPO",
    "GSPO",
    "K1",
    "K2",
    "K3",
    "RLOO",
    "Advantage",
    "BatchStats",
    "ConstantLength",
    "Correction",
    "DrGRPO",
    "GeometricMeanMask",
    "Head",
    "Loss",
    "NoCorrection",
    "Normalizer",
    "Objective",
    "ObjectiveOptions",
    "PPOClip",
    "ProductMask",
    "ReferenceKL",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RunningBaseline",
    "SequenceMean",
    "TokenMask",
    "TokenMean",
    "TokenTruncation",
    "token_logprobs",
]
