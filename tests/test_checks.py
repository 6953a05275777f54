"""Mistakes are found before the first rollout, with their numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from logra_lightning import Reward, SamplingParams
from logra_lightning.checks import (
    check_at_least_one,
    check_data,
    check_data_fits,
    check_dtype,
    check_evaluation,
    check_groups,
    check_lengths,
    check_minibatches,
    check_rewards,
    check_rope,
    check_sampling,
)
from logra_lightning.objective import GRPO, RunningBaseline
from logra_lightning.policy import MemoryOptions
from logra_lightning.rewards import exact_match
from logra_lightning.rollout import DynamicSampling, EvaluationOptions
from tests.conftest import TINY_POLICY


def test_lengths_that_do_not_fit_are_refused_with_numbers() -> None:
    check_lengths(10, "training row 3", 6, 6, 16, 16)
    with pytest.raises(
        ValueError, match="training row 3, has 10 .* up to 7, 17 in all, .* take 16"
    ):
        check_lengths(10, "training row 3", 6, 7, 16, 100)
    with pytest.raises(
        ValueError, match="training row 3, has 10, .*microbatch=15: raise it to at least 16"
    ):
        check_lengths(10, "training row 3", 6, 6, 16, 15)


def test_the_precision_decides_the_dtype_of_the_weights() -> None:
    for precision, dtype in ("32-true", "float32"), ("bf16-mixed", None), ("bf16-true", "bfloat16"):
        check_dtype({"dtype": dtype} if dtype else {}, precision)
    with pytest.raises(ValueError, match=r"bfloat16, but trainer\.precision bf16-mixed makes"):
        check_dtype({"dtype": "bfloat16"}, "bf16-mixed")
    for precision in "16-mixed", "16-true", "64-true":
        with pytest.raises(ValueError, match=f"trainer.precision is {precision}, which a policy"):
            check_dtype({}, precision)


def test_rewards_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"model\.rewards is empty"):
        check_rewards([])
    check_rewards([Reward(exact_match), Reward(exact_match, name="other")])
    with pytest.raises(ValueError, match="two rewards have the same name"):
        check_rewards([Reward(exact_match), Reward(exact_match)])


def test_training_samples_from_the_policy_itself() -> None:
    check_sampling(SamplingParams(temperature=0.6))
    for options, message in (
        ({"temperature": 0.0}, "temperature is 0: training needs completions that differ"),
        ({"top_p": 0.9}, r"top_p=0\.9 and top_k=0"),
        ({"top_k": 5}, r"top_p=1\.0 and top_k=5"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sampling(SamplingParams(**options))


def test_a_group_must_be_large_enough_for_what_compares_it() -> None:
    check_groups(1, RunningBaseline(), drops_groups=False)
    with pytest.raises(ValueError, match="group_size is 1, but GRPO .* at least 2"):
        check_groups(1, GRPO(), drops_groups=False)
    with pytest.raises(ValueError, match="dynamic_sampling would drop them all"):
        check_groups(1, RunningBaseline(), drops_groups=True)


def test_several_completions_in_validation_need_a_temperature_and_enough_of_them() -> None:
    check_evaluation(4, [1, 4], SamplingParams(temperature=0.6))
    with pytest.raises(ValueError, match="evaluation.completions is 4, but greedy completions"):
        check_evaluation(4, [1], SamplingParams(temperature=0.0))
    with pytest.raises(ValueError, match=r"pass_k is \[1, 8\].*evaluation.completions=4"):
        check_evaluation(4, [1, 8], SamplingParams(temperature=0.6))


def test_prompts_must_share_out_among_minibatches_and_the_nearest_number_is_told() -> None:
    check_minibatches(12, 4)
    with pytest.raises(ValueError, match="prompts_per_step=10 .*minibatches=4 .* is 8"):
        check_minibatches(10, 4)


def test_counts_below_one_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.inner_epochs must be at least 1, got 0"):
        check_at_least_one({"minibatches": 1, "inner_epochs": 0})


def test_prompts_are_checked_by_the_config_before_the_policy_is_loaded() -> None:
    row = "training row 3"

    def module(max_tokens: int) -> Any:
        return SimpleNamespace(
            model_path=str(TINY_POLICY),
            model_kwargs={"max_position_embeddings": 16},
            sampling=SamplingParams(max_tokens),
            evaluation=EvaluationOptions(sampling=SamplingParams(max_tokens)),
            engine=SimpleNamespace(max_model_len=None),
            memory=MemoryOptions(),
        )

    def data(prompt: list[int]) -> Any:
        return SimpleNamespace(largest=lambda measure: (measure(prompt), row))

    size = AutoConfig.from_pretrained(TINY_POLICY).vocab_size
    check_data_fits(module(14), data([1, size - 1]))
    with pytest.raises(ValueError, match=f"{row} has the token id {size}, .* {size} embeddings"):
        check_data_fits(module(14), data([size, 1]))
    with pytest.raises(ValueError, match=f"{row}, has 2 tokens .* 17 in all, .* take 16"):
        check_data_fits(module(15), data([1, 1]))


def test_rows_whose_logprobs_depend_on_their_neighbours_are_refused() -> None:
    check_rope(64, None)
    check_rope(64, 64)
    with pytest.raises(ValueError, match=r"may have 65 tokens, but beyond 64 .*longest row"):
        check_rope(65, 64)


def test_overfitting_and_other_prompts_in_place_of_some_are_not_possible_together() -> None:
    def module(max_refills: int) -> Any:
        return SimpleNamespace(
            rewards=[Reward(exact_match)],
            num_minibatches=1,
            dynamic_sampling=DynamicSampling(max_refills=max_refills),
            trainer=SimpleNamespace(overfit_batches=1),
        )

    data = SimpleNamespace(refill=None)
    check_data(module(0), data, "fit")
    with pytest.raises(ValueError, match=r"overfit_batches .*dynamic_sampling\.max_refills=0"):
        check_data(module(1), data, "fit")
