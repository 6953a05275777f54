"""Rewards: plain functions of a completion and the columns of its row."""

from logra_lightning.rewards.answers import unusable_rows, voted_answers
from logra_lightning.rewards.calls import log_metric
from logra_lightning.rewards.gym_task import GymScore
from logra_lightning.rewards.math_answer import MathReward
from logra_lightning.rewards.reward import Reward
from logra_lightning.rewards.score import Scores, check_columns, score
from logra_lightning.rewards.text import (
    FormatMatch,
    RepetitionPenalty,
    SoftOverlong,
    exact_match,
)

__all__ = [
    "FormatMatch",
    "GymScore",
    "MathReward",
    "RepetitionPenalty",
    "Reward",
    "Scores",
    "SoftOverlong",
    "check_columns",
    "exact_match",
    "log_metric",
    "score",
    "unusable_rows",
    "voted_answers",
]
