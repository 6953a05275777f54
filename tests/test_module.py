"""PolicyModule: a batch may be cut in any way; mistakes are found before the first rollout."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from logra_lightning import (
    AdamWOptions,
    EvaluationOptions,
    MemoryOptions,
    ObjectiveOptions,
    PolicyModule,
    RelativeRowAdam,
    Reward,
    RowAdam,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
)
from logra_lightning.callbacks import StepCheckpoint
from logra_lightning.objective import (
    K2,
    K3,
    ConstantLength,
    GeometricMeanMask,
    NoCorrection,
    PPOClip,
    ProductMask,
    RunningBaseline,
    SequenceMean,
    TokenMask,
    TokenMean,
    TokenTruncation,
)
from logra_lightning.rewards import exact_match
from logra_lightning.rollout import DynamicSampling
from logra_lightning.types import Completion, PromptBatch, Rollouts
from tests.conftest import TINY_POLICY
from tests.runs import data, digits, fit, policy, trainer, weights

pytestmark = pytest.mark.usefixtures("private_datasets_cache")


@pytest.mark.parametrize("train_others", [False, True])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_microbatches_do_not_change_the_update(
    tmp_path: Path, train_others: bool, activation_checkpointing: bool
) -> None:
    results = []
    for max_tokens, chunk in ((10_000, 512), (100, 7), (25, 1)):
        module = policy(
            memory=MemoryOptions(max_tokens, activation_checkpointing and max_tokens == 100, chunk),
            train_others=train_others,
            adamw=AdamWOptions(lr=1e-3, eps=1e-3),  # a large eps: no sign of rounding noise
        )
        fit(tmp_path, module, steps=1)
        results.append(weights(module))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=2e-5)


def test_only_targets_move_unless_others_are_trained(tmp_path: Path) -> None:
    before = policy()
    fit(tmp_path, before, max_steps=0)
    start = weights(before)
    for train_others in (False, True):
        module = policy(train_others=train_others, adamw=AdamWOptions(lr=1e-3))
        fit(tmp_path, module)
        moved = {n for n, w in weights(module).items() if not torch.equal(w, start[n])}
        projections = {n for n in start if "_proj." in n}
        assert moved == (set(start) if train_others else projections)
        assert all(p.grad is None for p in module.parameters())


def test_custom_targets_alone_are_trained(tmp_path: Path) -> None:
    module = policy()
    fit(tmp_path, module, max_steps=0)
    start = weights(module)
    fit(tmp_path, module, strategy=SketchStrategy(rank=16, targets=["v_proj"]))
    moved = {n for n, w in weights(module).items() if not torch.equal(w, start[n])}
    assert moved == {n for n in start if "v_proj" in n}


def test_without_sketches_adamw_trains_the_same_weights_densely(tmp_path: Path) -> None:
    module = policy(adamw=AdamWOptions(lr=1e-3))
    fit(tmp_path, module, max_steps=0)
    start = weights(module)
    run = fit(tmp_path, module, strategy="auto")
    moved = {n for n, w in weights(module).items() if not torch.equal(w, start[n])}
    assert moved == {n for n in start if "_proj." in n}
    assert isinstance(run.optimizers[0], torch.optim.AdamW)
    assert run.global_step == 2


def test_first_sketch_equals_the_dense_gradient_times_the_projection(tmp_path: Path) -> None:
    """The whole path of a batch, against plain autograd on the same rollouts."""
    found: dict[str, Any] = {}

    class Spy(PolicyModule):
        def collect(self, prompts: PromptBatch) -> Rollouts:
            found["rollouts"] = super().collect(prompts)
            return found["rollouts"]

        def take_step(self) -> None:
            found["sketches"] = {
                s.name: (s.sketch, s.projection) for s in self.trainer.strategy.sketches
            }
            found["start"] = weights(self)
            super().take_step()

    module = Spy(
        model=str(TINY_POLICY),
        rewards=[Reward(digits)],
        group_size=4,
        sampling=SamplingParams(max_tokens=6, temperature=0.7),
        memory=MemoryOptions(60),
    )
    fit(tmp_path, module, steps=1)
    rollouts: Rollouts = found["rollouts"]
    assert (rollouts.advantages != 0).any()
    plain = module.policy
    plain.load_state_dict({n.removeprefix("policy."): w for n, w in found["start"].items()})
    plain.requires_grad_(True)
    for prompt, completion, advantage in zip(
        rollouts.prompt_ids, rollouts.completions, rollouts.advantages, strict=True
    ):
        ids = torch.tensor([prompt + completion.token_ids])
        logits = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
        (-advantage * logprobs.sum() / rollouts.num_completion_tokens).backward()
    for name, (sketch, projection) in found["sketches"].items():
        gradient = plain.get_submodule(name.removeprefix("policy.")).weight.grad
        torch.testing.assert_close(sketch, gradient @ projection.t(), rtol=1e-3, atol=1e-5)


def test_rollouts_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    results = []
    for noise in (0, 1):
        seed_everything(noise, verbose=False)
        module = policy()
        fit(tmp_path, module)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    other = policy(seed=1)
    fit(tmp_path, other)
    assert any(not torch.equal(w, results[0][n]) for n, w in weights(other).items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_trains_and_keeps_what_it_needs_in_fp32(
    tmp_path: Path, precision: Any
) -> None:
    module = policy(train_others=True, group_size=8, optimizer=RelativeRowAdam)
    run = fit(tmp_path, module, precision=precision)
    expected = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in module.parameters()} == {expected}
    assert {b.dtype for b in module.buffers()} == {torch.float32}  # rotary frequencies
    for state in run.optimizers[0].state.values():
        floats = {value.dtype for value in state.values() if value.is_floating_point()}
        assert floats == {torch.float32}
        assert state["step"].item() == 2


def test_logged_metrics_say_what_happened(tmp_path: Path) -> None:
    run = fit(tmp_path, policy(), steps=1)
    logged = {name: float(value) for name, value in run.logged_metrics.items()}
    families = {
        "rollout": "reward reward_std length length_min length_max truncated_frac tokens "
        "zero_variance_frac zero_advantage_frac",
        "rewards": "digits",
        "loss": "policy clip_frac",
        "policy": "entropy",
        "mismatch": "logprob_diff logprob_diff_max kl is_ratio is_ratio_min is_ratio_max "
        "effective_sample_frac masked_frac",
        "sketch": "norm zero_frac",
        "optim": "grad_norm step_scale",
        "time": "rollout_s logprobs_s train_s update_s step_s",
    }
    for name in (f"{family}/{n}" for family, names in families.items() for n in names.split()):
        assert name in logged
    assert logged["mismatch/logprob_diff"] < 1e-5  # the engine samples from the policy itself
    assert logged["mismatch/is_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert logged["mismatch/effective_sample_frac"] == pytest.approx(1.0, abs=1e-5)
    assert logged["loss/clip_frac"] == 0.0
    assert logged["sketch/norm"] == pytest.approx(logged["optim/grad_norm"])
    assert logged["optim/step_scale"] == 1.0


def test_validation_is_greedy_and_leaves_training_alone(tmp_path: Path) -> None:
    quiet, watched = policy(rewards=[Reward(exact_match)]), policy(rewards=[Reward(exact_match)])
    fit(tmp_path, quiet, steps=3)
    run = fit(
        tmp_path,
        watched,
        steps=3,
        limit_val_batches=1.0,
        val_check_interval=1,
        check_val_every_n_epoch=None,
    )
    torch.testing.assert_close(weights(quiet), weights(watched), rtol=0, atol=0)
    result = run.validate(watched, datamodule=data(tmp_path), verbose=False)[0]
    rows = [row for batch in run.predict(watched, datamodule=data(tmp_path)) for row in batch]
    assert result["eval/pass@1"] == pytest.approx(sum(r["reward"] >= 1 for r in rows) / len(rows))
    assert result["eval/length"] == pytest.approx(sum(r["length"] for r in rows) / len(rows))
    assert (
        run.test(watched, datamodule=data(tmp_path), verbose=False)[0]["test/pass@1"]
        == (result["eval/pass@1"])
    )
    assert [row["row"] for row in rows] == list(range(8))


@pytest.mark.parametrize(
    ("correction", "logprob"),
    [
        (TokenTruncation(), None),
        (TokenMask(), float("nan")),
        (ProductMask(), float("inf")),
        (GeometricMeanMask(), float("-inf")),
        (NoCorrection(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_token_without_a_finite_logprob_trains_nothing_with_any_correction(
    tmp_path: Path, correction: Any, logprob: float | None
) -> None:
    class OneMissing(TorchEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            groups = super().generate(*args, **kwargs)
            first = groups[0][0]
            values: Any = [*first.logprobs[:-1].tolist(), logprob]
            groups[0][0] = Completion(first.token_ids, values, first.truncated)
            return groups

    options = ObjectiveOptions(correction=correction)
    module = policy(engine=OneMissing(), objective=options, group_size=8)
    with pytest.warns(UserWarning, match="no finite logprob for 1 of"):
        run = fit(tmp_path, module, steps=1)
    logged = {name: float(value) for name, value in run.logged_metrics.items()}
    assert logged["mismatch/invalid_tokens"] == 1
    assert logged["mismatch/logprob_diff_max"] < 1e-4  # the engine samples from the policy itself
    assert logged["mismatch/masked_frac"] == 0
    assert logged["optim/step_scale"] == 1
    assert module._minibatch.num_completion_tokens == logged["rollout/tokens"] - 1
    assert all(torch.tensor(value).isfinite() for value in logged.values())


def steps_of(module: PolicyModule) -> list[dict[str, Any]]:
    """Watch every optimizer step: what it trains on, and the weights before it."""
    seen: list[dict[str, Any]] = []
    take_step = module.take_step

    def watch() -> None:
        seen.append({"rollouts": module._minibatch, "weights": weights(module)})
        take_step()

    module.take_step = watch  # type: ignore[method-assign]
    return seen


def test_each_minibatch_of_each_epoch_is_one_step_and_the_old_policy_stays(tmp_path: Path) -> None:
    module = policy(inner_epochs=2, minibatches=2)
    seen = steps_of(module)
    run = fit(tmp_path, module, steps=8)
    assert run.global_step == len(seen) == 8
    for batch in (seen[:4], seen[4:]):
        rows = [sorted(set(step["rollouts"].rows)) for step in batch]
        assert all(len(step["rollouts"]) == 2 * 4 for step in batch)
        for epoch in (rows[:2], rows[2:]):
            assert len(epoch[0] + epoch[1]) == len(set(epoch[0] + epoch[1])) == 4
        # The old logprobs are those of the weights when the batch began, recomputed here.
        assert module.policy is not None
        step = batch[-1]
        module.load_state_dict(batch[0]["weights"])
        for actual, expected in zip(
            step["rollouts"].old_logprobs, module.logprobs(step["rollouts"]), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_later_steps_are_clipped_where_the_first_is_not(tmp_path: Path) -> None:
    found = {}
    for epochs in (1, 4):
        module = policy(inner_epochs=epochs, objective=ObjectiveOptions(loss=PPOClip(1e-3, 1e-3)))
        run = fit(tmp_path, module, steps=epochs)
        found[epochs] = float(run.logged_metrics["loss/clip_frac"])
    assert found[1] == 0.0
    assert found[4] > 0.05


def test_steps_that_would_end_in_the_middle_of_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_steps is 6, .* = 4 steps, .* that works is 8"):
        fit(tmp_path, policy(inner_epochs=2, minibatches=2), steps=6)
    callbacks = [SketchAccumulation(), ModelCheckpoint(tmp_path, every_n_train_steps=3)]
    with pytest.raises(ValueError, match="every_n_train_steps of ModelCheckpoint is 3, .* is 4"):
        fit(
            tmp_path,
            policy(inner_epochs=4),
            steps=8,
            callbacks=callbacks,
            enable_checkpointing=True,
        )


MASKED = ObjectiveOptions(mask_truncated=True)


def truncated_ones(tmp_path: Path, max_tokens: int, **options: Any) -> tuple[Any, Any, Any]:
    module = policy(sampling=SamplingParams(max_tokens), objective=MASKED, group_size=8, **options)
    seen = steps_of(module)
    with pytest.warns(UserWarning, match=f"cut off at model.sampling.max_tokens={max_tokens}"):
        run = fit(tmp_path, module, steps=2)
    return module, seen, run


@pytest.mark.parametrize("strategy", ["sketch", "auto"])
def test_where_every_completion_is_cut_off_nothing_moves(tmp_path: Path, strategy: str) -> None:
    options = {} if strategy == "sketch" else {"adamw": AdamWOptions(lr=1e-2)}
    module = policy(sampling=SamplingParams(1), objective=MASKED, **options)
    fit(tmp_path, module, max_steps=0)
    start = weights(module)
    fresh = policy(sampling=SamplingParams(1), objective=MASKED, **options)
    with pytest.warns(UserWarning, match="100% of the first batch"):
        run = (
            fit(tmp_path, fresh, strategy=strategy) if strategy == "auto" else fit(tmp_path, fresh)
        )
    torch.testing.assert_close(weights(fresh), start, rtol=0, atol=0)
    assert run.global_step == 2
    assert run.logged_metrics["rollout/truncated_frac"] == 1.0
    assert run.logged_metrics["rollout/length"] == 1.0
    for state in run.optimizers[0].state.values():
        assert not any(v.any() for n, v in state.items() if n in ("v", "exp_avg", "exp_avg_sq"))


def test_masked_completions_leave_loss_and_denominator(tmp_path: Path) -> None:
    _, seen, _ = truncated_ones(tmp_path, 2)
    kept = seen[0]["rollouts"]
    assert 0 < len(kept) < 4 * 8
    assert not kept.truncated.any()


def test_completions_without_a_reward_leave_loss_and_denominator(tmp_path: Path) -> None:
    def even_only(completion: str) -> float | None:
        return None if digits(completion) % 2 else digits(completion)

    module = policy(rewards=[Reward(even_only)], group_size=8)
    seen = steps_of(module)
    run = fit(tmp_path, module)
    trained = seen[-1]["rollouts"]
    share = float(run.logged_metrics["rollout/unscored_frac"])
    assert 0 < len(trained) < 4 * 8
    assert share == pytest.approx(1 - len(trained) / 32)
    assert trained.step_counts == (trained.num_completion_tokens, len(trained))
    texts = module.decode([c.token_ids for c in trained.completions])
    assert [digits(text) for text in texts] == trained.rewards.tolist()


def test_a_batch_in_which_no_completion_has_a_reward_changes_nothing(tmp_path: Path) -> None:
    def first_step_only(completion: str) -> float | None:
        return digits(completion) if module.global_step == 0 else None

    module = policy(rewards=[Reward(first_step_only)])
    seen = steps_of(module)
    with pytest.warns(UserWarning, match="first_step_only returned None for all"):
        run = fit(tmp_path, module, steps=3)
    torch.testing.assert_close(weights(module), seen[1]["weights"], rtol=0, atol=0)
    assert run.global_step == 3
    assert run.logged_metrics["rollout/unscored_frac"] == 1.0


def test_reference_is_the_start_of_the_run_also_after_a_resume(tmp_path: Path) -> None:
    def build() -> PolicyModule:
        return policy(
            objective=ObjectiveOptions(reference_kl=K3(0.1)),
            train_others=True,
            adamw=AdamWOptions(lr=1e-2),
        )

    module = build()
    seen = steps_of(module)
    run = fit(tmp_path, module, steps=3)
    start = seen[0]["weights"]
    assert float(run.logged_metrics["loss/reference_kl"]) > 1e-4
    run.save_checkpoint(tmp_path / "x.ckpt")

    resumed = build()
    again = steps_of(resumed)
    trainer(tmp_path, 4).fit(resumed, datamodule=data(tmp_path), ckpt_path=tmp_path / "x.ckpt")
    (step,) = again
    torch.testing.assert_close(step["weights"], weights(module), rtol=0, atol=0)
    resumed.load_state_dict(start)
    for actual, expected in zip(
        step["rollouts"].reference_logprobs, resumed.logprobs(step["rollouts"]), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_reference_kl_of_the_first_step_is_zero_and_the_policy_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    plain, held = policy(), policy(objective=ObjectiveOptions(reference_kl=K2(10.0)))
    fit(tmp_path, plain, steps=1)
    run = fit(tmp_path, held, steps=1)
    assert float(run.logged_metrics["loss/reference_kl"]) < 1e-9
    torch.testing.assert_close(weights(held), weights(plain), rtol=1e-5, atol=1e-6)


def test_entropy_bonus_has_the_gradient_of_the_entropy(tmp_path: Path) -> None:
    """Against a plain forward pass, together with the policy gradient."""
    module = policy(objective=ObjectiveOptions(entropy_coefficient=0.5), train_others=True)
    found = {}
    take_step = module.take_step

    def watch() -> None:
        others = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        found.update(grads=others, rollouts=module._minibatch, start=weights(module))
        take_step()

    module.take_step = watch  # type: ignore[method-assign]
    fit(tmp_path, module, steps=1)
    plain = module.policy
    module.load_state_dict(found["start"])
    plain.requires_grad_(True)
    rollouts = found["rollouts"]
    for prompt, completion, advantage in zip(
        rollouts.prompt_ids, rollouts.completions, rollouts.advantages, strict=True
    ):
        ids = torch.tensor([prompt + completion.token_ids])
        logprobs = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum()
        drawn = logprobs.gather(-1, ids[0, len(prompt) :, None]).sum()
        loss = -advantage * drawn - 0.5 * entropy
        (loss / rollouts.num_completion_tokens).backward()
    assert found["grads"]
    for name, gradient in found["grads"].items():
        torch.testing.assert_close(
            gradient, dict(module.named_parameters())[name].grad, rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("extra", [{"reference_kl": K3(0.1)}, {"entropy_coefficient": 0.1}])
def test_where_all_rewards_are_equal_nothing_else_makes_a_step(tmp_path: Path, extra: Any) -> None:
    """Case 15: normalized rules would make a whole step of a regularizer alone."""

    def first_step_only(completion: str) -> float:
        return digits(completion) if module.global_step == 0 else 1.0

    module = policy(rewards=[Reward(first_step_only)], objective=ObjectiveOptions(**extra))
    seen = steps_of(module)
    run = fit(tmp_path, module, steps=3)
    torch.testing.assert_close(weights(module), seen[1]["weights"], rtol=0, atol=0)
    assert run.logged_metrics["optim/step_scale"] == 0.0


def test_a_batch_without_signal_moves_nothing_in_a_dense_run(tmp_path: Path) -> None:
    def first_step_only(completion: str) -> float:
        return digits(completion) if module.global_step == 0 else 1.0

    module = policy(rewards=[Reward(first_step_only)], adamw=AdamWOptions(lr=1e-3))
    seen = steps_of(module)
    fit(tmp_path, module, steps=3, strategy="auto")
    moved = [n for n, w in seen[1]["weights"].items() if not torch.equal(w, seen[0]["weights"][n])]
    assert moved
    # AdamW's moments alone would move them on.
    torch.testing.assert_close(weights(module), seen[1]["weights"], rtol=0, atol=0)


def test_dynamic_sampling_trains_on_groups_that_differ_and_resumes_exactly(tmp_path: Path) -> None:
    def sometimes(completion: str) -> float:
        return digits(completion) % 2

    def build() -> PolicyModule:
        return policy(rewards=[Reward(sometimes)], dynamic_sampling=DynamicSampling(4))

    module = build()
    seen = steps_of(module)
    fit(tmp_path, module, steps=4)
    dropped = [step["rollouts"].metrics["rollout/dropped_groups"] for step in seen]
    assert all((step["rollouts"].advantages != 0).all() for step in seen)
    assert sum(dropped) > 0
    half = build()
    stopped = fit(tmp_path, half, steps=2)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed = build()
    trainer(tmp_path, 4).fit(resumed, datamodule=data(tmp_path), ckpt_path=tmp_path / "half.ckpt")
    torch.testing.assert_close(weights(resumed), weights(module), rtol=0, atol=0)


def test_a_running_baseline_goes_on_after_a_resume(tmp_path: Path) -> None:
    def build() -> PolicyModule:
        return policy(objective=ObjectiveOptions(RunningBaseline(0.3)), group_size=1)

    straight = build()
    fit(tmp_path, straight, steps=4)
    run = fit(tmp_path, build(), steps=2)
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed = build()
    trainer(tmp_path, 4).fit(resumed, datamodule=data(tmp_path), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.advantage.baseline == straight.advantage.baseline
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


def test_several_completions_per_prompt_in_validation(tmp_path: Path) -> None:
    module = policy(
        rewards=[Reward(exact_match)],
        evaluation=EvaluationOptions(SamplingParams(6, temperature=1.0), completions=4),
    )
    run = trainer(tmp_path, limit_val_batches=1.0)
    result = run.validate(module, datamodule=data(tmp_path), verbose=False)[0]
    groups = [module.eval_rows[i : i + 4] for i in range(0, len(module.eval_rows), 4)]
    assert len(groups) == 8
    right = [[row["reward"] >= 1 for row in group] for group in groups]
    assert result["eval/pass@4"] == pytest.approx(sum(map(any, right)) / 8)
    assert result["eval/avg@4"] == pytest.approx(sum(map(sum, right)) / 32)
    assert result["eval/pass@1"] == pytest.approx(result["eval/avg@4"])
    majorities = []
    for rows, successes in zip(groups, right, strict=True):
        votes = [row["answer"] for row in rows]
        winner = max(dict.fromkeys(votes), key=votes.count)  # the first of the most frequent ones
        chosen = [ok for vote, ok in zip(votes, successes, strict=True) if vote == winner]
        majorities.append(sum(chosen) / len(chosen))
    assert result["eval/maj@4"] == pytest.approx(sum(majorities) / 8)


@pytest.mark.parametrize(
    "normalizer", [TokenMean(), SequenceMean(), ConstantLength(6)], ids=lambda n: type(n).__name__
)
def test_no_normalizer_depends_on_the_cut_into_microbatches(
    tmp_path: Path, normalizer: Any
) -> None:
    results = []
    for max_tokens in (10_000, 25):
        module = policy(
            objective=ObjectiveOptions(normalizer=normalizer), memory=MemoryOptions(max_tokens)
        )
        fit(tmp_path, module, steps=1)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=2e-5)


def test_lightnings_own_callbacks_stop_early_and_keep_the_best(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="eval/pass@1", mode="max", save_top_k=1)
    patience = EarlyStopping("eval/pass@1", patience=1, min_delta=2.0, mode="max")  # never better
    run = fit(
        tmp_path,
        policy(rewards=[Reward(exact_match)]),
        steps=20,
        limit_val_batches=1.0,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[SketchAccumulation(), best, patience],
    )
    assert run.global_step == 2  # the first sets the mark, the second is not better
    assert best.best_model_score is not None
    assert Path(best.best_model_path).is_file()


def needs_solution(completion: str, solution: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingParams(6, temperature=0.0)}, "temperature is 0: training needs"),
        ({"sampling": SamplingParams(6, top_p=0.9)}, "top_p=0.9 and top_k=0: .* another distrib"),
        ({"sampling": SamplingParams(6, top_k=3)}, "top_p=1.0 and top_k=3: .* another distrib"),
        ({"group_size": 1}, "group_size is 1, but GRPO compares .* at least 2"),
        ({"rewards": []}, "model.rewards is empty"),
        ({"rewards": [Reward(digits), Reward(digits)]}, "two rewards have the same name"),
        ({"memory": MemoryOptions(0)}, "memory.max_tokens_per_microbatch .* at least 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive or null"),
        (
            {"objective": ObjectiveOptions(entropy_coefficient=float("nan"))},
            "must be a finite number",
        ),
        ({"objective": None}, "model.objective is null: leave it out for its defaults"),
        ({"evaluation": EvaluationOptions(completions=0)}, "evaluation.completions .* at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": [Reward(needs_solution)]}, "asks for 'solution', but the data set has only"),
        (
            {"sampling": SamplingParams(60)},
            "completions up to 60, .* its engine take 64",
        ),
        ({"memory": MemoryOptions(10)}, "raise it to at least 20"),
        ({"model": "./nowhere"}, "there is no model folder './nowhere'"),
    ],
)
def test_what_the_data_shows_is_refused_before_the_first_rollout(
    tmp_path: Path, options: Any, message: str
) -> None:
    module = policy(**options)
    module.collect = lambda prompts: pytest.fail("a rollout was made")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, module)


@pytest.mark.parametrize("strategy", ["auto", "sketch"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_clip_val": 1.0}, "set model.max_grad_norm instead"),
        ({"accumulate_grad_batches": 4}, "cut into microbatches by model.memory.max_tokens_"),
    ],
)
def test_trainer_options_name_ours(
    tmp_path: Path, strategy: str, option: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, policy(), strategy=strategy, **option)


@pytest.mark.parametrize(("first", "second"), [("sketch", "auto"), ("auto", "sketch")])
def test_a_checkpoint_of_the_other_kind_of_run_is_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    def strategy(name: str) -> Any:
        return SketchStrategy(rank=32) if name == "sketch" else name

    run = fit(tmp_path, policy(), steps=1, strategy=strategy(first))
    run.save_checkpoint(tmp_path / "x.ckpt")
    other = trainer(tmp_path, strategy=strategy(second))
    with pytest.raises(ValueError, match="resume with "):
        other.fit(policy(), datamodule=data(tmp_path), ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_resumed_equals_never_stopped_bit_for_bit(tmp_path: Path, precision: Any) -> None:
    def steps(stop: int, ckpt_path: Path | None = None) -> tuple[PolicyModule, Trainer]:
        module = policy(train_others=True, adamw=AdamWOptions(lr=1e-3))
        run = trainer(tmp_path, stop, precision=precision)
        run.fit(module, datamodule=data(tmp_path), ckpt_path=ckpt_path)
        return module, run

    straight, _ = steps(6)
    _, stopped = steps(3)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = steps(6, tmp_path / "half.ckpt")
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


@pytest.mark.parametrize("advantage", [None, RunningBaseline(0.3)])
def test_a_run_interrupted_in_a_batch_makes_that_batch_again(
    tmp_path: Path, advantage: RunningBaseline | None
) -> None:
    class Interrupted(PolicyModule):
        def take_step(self) -> None:
            if self.global_step == 2:
                raise RuntimeError("stop here")
            super().take_step()

    straight = policy(objective=ObjectiveOptions(deepcopy(advantage)))
    fit(tmp_path, straight, steps=5)
    module = policy(objective=ObjectiveOptions(deepcopy(advantage)))
    module.__class__ = Interrupted

    def options() -> dict[str, Any]:
        saves = StepCheckpoint(dirpath=tmp_path / "saved")
        return {"callbacks": [SketchAccumulation(), saves], "enable_checkpointing": True}

    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, module, steps=5, **options())
    path = tmp_path / "saved" / "last.ckpt"
    resumed = policy(objective=ObjectiveOptions(deepcopy(advantage)))
    trainer(tmp_path, 5, **options()).fit(resumed, datamodule=data(tmp_path), ckpt_path=path)
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["auto", "sketch"])
def test_a_gradient_that_is_not_finite_is_skipped_counted_and_stops_the_run(
    tmp_path: Path, strategy: str
) -> None:
    """It begins in the backward pass of a layer in the middle."""
    name = "model.layers.1.self_attn.v_proj"

    def poison(layer: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad and module.global_step > 0:
            output.register_hook(lambda grad: grad * float("nan"))

    class Poison(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            module.policy.get_submodule(name).register_forward_hook(poison)

    module = policy(max_grad_norm=None, group_size=8)
    seen = steps_of(module)
    options = {"strategy": "auto"} if strategy == "auto" else {}
    run = trainer(tmp_path, 9, callbacks=[SketchAccumulation(), Poison()], **options)
    with (
        pytest.warns(UserWarning, match=rf"step \d: .* first in 'policy.{name}") as told,
        pytest.raises(FloatingPointError, match=rf"step 4: .*'policy.{name}.* in 4 steps in a row"),
    ):
        run.fit(module, datamodule=data(tmp_path))
    skipped = [str(w.message)[:7] for w in told if "nothing was updated" in str(w.message)]
    assert skipped == ["step 1:", "step 2:", "step 3:"]
    assert not any("because the output" in str(w.message) for w in told)
    assert run.callback_metrics["optim/skipped_steps"] == 3
    assert any(not torch.equal(w, seen[0]["weights"][n]) for n, w in seen[1]["weights"].items())
    torch.testing.assert_close(weights(module), seen[1]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["auto", "sketch"])
def test_a_forward_pass_that_is_not_finite_is_blamed_on_its_first_module(
    tmp_path: Path, strategy: str
) -> None:
    module = policy()
    collect = module.collect

    def then_poison(prompts: PromptBatch) -> Rollouts:
        rollouts = collect(prompts)
        module.policy.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        return rollouts

    module.collect = then_poison  # type: ignore[method-assign]
    options = {"strategy": "auto"} if strategy == "auto" else {}
    words = "because the output of 'model.layers.1.mlp.up_proj' is not finite; nothing was"
    with pytest.warns(UserWarning, match=rf"step 0: the gradient is not finite in .*, {words}"):
        fit(tmp_path, module, steps=1, **options)


def test_several_processes_need_a_strategy_that_adds_once_per_step(tmp_path: Path) -> None:
    module = policy()
    module._trainer = trainer(tmp_path, strategy="auto")
    module._trainer.strategy.world_size = 2
    with pytest.raises(
        ValueError, match="averages gradients over 2 .* set trainer.strategy to sketch_ddp"
    ):
        module.setup("fit")


def test_lr_scheduler_advances_once_per_step(tmp_path: Path) -> None:
    module = policy(
        optimizer=RowAdam,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    run = fit(tmp_path, module, steps=3)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6 / 8)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("strategy", ["sketch", "auto"])
@pytest.mark.parametrize("scheduler", [None, halving])
def test_on_resume_the_learning_rates_of_now_hold_and_their_schedule_goes_on(
    tmp_path: Path, strategy: str, scheduler: Any, capsys: pytest.CaptureFixture
) -> None:
    def steps(stop: int, lr: float, ckpt_path: Path | None = None) -> Trainer:
        module = policy(
            train_others=True,
            optimizer=lambda *args: RowAdam(*args, lr=lr),
            adamw=AdamWOptions(lr=lr, weight_decay=lr),
            lr_scheduler=scheduler,
        )
        options = {} if strategy == "sketch" else {"strategy": "auto"}
        run = trainer(tmp_path, stop, **options)
        run.fit(module, datamodule=data(tmp_path), ckpt_path=ckpt_path)
        return run

    steps(2, 1e-3).save_checkpoint(tmp_path / "half.ckpt")
    again = steps(3, 1e-3, tmp_path / "half.ckpt")
    assert not again.optimizers[0].overruled
    other = steps(3, 4e-3, tmp_path / "half.ckpt")
    scale = 0.5**3 if scheduler else 1.0
    for group in other.optimizers[0].param_groups:
        assert group["lr"] == pytest.approx(4e-3 * scale)
    for group in again.optimizers[0].param_groups:
        assert group["lr"] == pytest.approx(1e-3 * scale)
    assert other.optimizers[0].overruled["model.adamw lr"] == (1e-3, 4e-3)
    assert other.optimizers[0].param_groups[-1]["weight_decay"] == 4e-3


def test_a_prompt_beyond_the_context_is_refused_before_the_policy_is_loaded(
    tmp_path: Path,
) -> None:
    module = policy(model_kwargs={"max_position_embeddings": 8})
    with pytest.raises(ValueError, match=r"longest prompt, .* row \d+, has .* take 8: lower"):
        fit(tmp_path, module)
    assert module.policy is None
