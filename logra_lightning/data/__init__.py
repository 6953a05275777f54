"""Data modules: where prompts come from, tokenized once, in an order that survives a resume."""

from logra_lightning.data.gym import GymSource, GymSpec, ReasoningGymDataModule
from logra_lightning.data.loader import PromptLoader
from logra_lightning.data.mix import MixedDataModule
from logra_lightning.data.module import TokenizedDataModule
from logra_lightning.data.prompts import PromptDataModule, PromptSource
from logra_lightning.data.resume import follow_loader
from logra_lightning.data.source_rows import Rows, SourceRows
from logra_lightning.data.tokenized_prompts import Part, TokenizedPrompts

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
    "follow_loader",
]
