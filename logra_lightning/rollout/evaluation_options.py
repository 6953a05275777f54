"""`EvaluationOptions`: the options of validation, as a user sets them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from logra_lightning.types import SamplingParams


@dataclass(frozen=True)
class EvaluationSampling:
    """How validation completions are drawn, where that differs from training.

    Args:
        max_tokens: longest completion, in tokens; that of `model.sampling` when left out.
        temperature: divides the logits; 0, the likeliest token, when left out.
        top_p: keep the smallest set of tokens whose probability reaches this; that of
            `model.sampling` when left out.
        top_k: keep this many likeliest tokens; that of `model.sampling` when left out.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class EvaluationOptions:
    """How validation, test and prediction sample, and what counts as a success.

    Args:
        sampling: how completions are drawn. What is left out in it is as in `model.sampling`, but
            the temperature, which is 0 (greedy) then. A `SamplingParams` has everything.
        completions: n, completions per prompt.
        pass_k: each k of pass@k, at most n; 1 and n when left out.
        success_reward: a completion with at least this reward counts as a success.
    """

    sampling: EvaluationSampling | SamplingParams | None = None
    completions: int = 1
    pass_k: list[int] | None = None
    success_reward: float = 1.0

    def completed(self, training: SamplingParams) -> EvaluationOptions:
        """With what was left out filled in: `sampling` is a `SamplingParams` then.

        For example `EvaluationSampling(temperature=0.6)` and training with 32 tokens make
        `SamplingParams(max_tokens=32, temperature=0.6)`.

        Args:
            training: how training completions are drawn.

        Raises:
            ValueError: a value is out of range, or `top_p` or `top_k` has no temperature to act on.
        """
        options = asdict(self.sampling) if self.sampling is not None else {}
        given = {name: value for name, value in options.items() if value is not None}
        if given.keys() & {"top_p", "top_k"} and "temperature" not in given:
            raise ValueError(
                "model.evaluation.sampling has top_p or top_k but no temperature, and without one "
                "completions are greedy: set model.evaluation.sampling.temperature"
            )
        return replace(
            self,
            sampling=replace(training, **({"temperature": 0.0} | given)),
            pass_k=self.pass_k or [1, self.completions],
        )
