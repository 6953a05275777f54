"""Validation samples as training does, greedily, but for what is given."""

from __future__ import annotations

from typing import Any

import pytest

from logra_lightning.rollout import EvaluationOptions, EvaluationSampling
from logra_lightning.types import SamplingParams

TRAINING = SamplingParams(max_tokens=32, temperature=0.7)


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        (None, SamplingParams(32, temperature=0.0)),
        (EvaluationSampling(), SamplingParams(32, temperature=0.0)),
        (EvaluationSampling(temperature=0.6), SamplingParams(32, temperature=0.6)),
        (EvaluationSampling(max_tokens=64), SamplingParams(64, temperature=0.0)),
        (
            EvaluationSampling(temperature=1.0, top_p=0.9, top_k=0),
            SamplingParams(32, temperature=1.0, top_p=0.9),
        ),
        (SamplingParams(8), SamplingParams(8)),
    ],
)
def test_what_is_left_out_is_as_in_training_but_greedy(
    given: Any, sampling: SamplingParams
) -> None:
    assert EvaluationOptions(given).completed(TRAINING).sampling == sampling


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_choice_among_tokens_needs_a_temperature(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top_p or top_k but no temperature"):
        EvaluationOptions(EvaluationSampling(**option)).completed(TRAINING)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be finite"):
        EvaluationOptions(EvaluationSampling(temperature=-1.0)).completed(TRAINING)


def test_pass_at_one_and_at_all_are_the_default() -> None:
    assert EvaluationOptions(completions=4).completed(TRAINING).pass_k == [1, 4]
    assert EvaluationOptions(completions=4, pass_k=[2]).completed(TRAINING).pass_k == [2]
