"""Data modules: where prompts come from, tokenized once, in an order that survives a resume."""

from logra_lightning.data.gym import GymSource, GymSpec, ReasoningGymDataModule
from logra_lightning.data.loader import Part, PromptLoader, TokenizedPrompts
from logra_lightning.data.mix import MixedDataModule, PromptSource
from logra_lightning.data.prompts import PromptDataModule
from logra_lightning.data.tokenized import Rows, SourceRows, TokenizedDataModule

__all__ = [
    "GymSource",
    "GymSpec",
    "MixedDataModule",
    "Part",
    "PromptDataModule",
    "PromptLoader",
    "PromptSource",
    "ReasoningGymDataModule",
    "Rows",
    "SourceRows",
    "TokenizedDataModule",
    "TokenizedPrompts",
]
