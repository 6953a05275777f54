"""Rewards: plain functions on completions and the columns of their rows."""

from logra_lightning.rewards.gym_task import GymScore
from logra_lightning.rewards.reward import Reward, check_columns, score
from logra_lightning.rewards.text_format import exact_match

__all__ = ["GymScore", "Reward", "check_columns", "exact_match", "score"]
