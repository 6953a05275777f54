"""Success over several completions per prompt, and `EvalMetrics`: all that a validation logs.

Shape letters: P prompts, n completions per prompt. Every metric is a mean over prompts, kept as a
sum and a count, so that it adds over batches and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from logra_lightning.ranks import of_all_ranks

# Per prompt.


def pass_at_k(successes: Tensor, k: int) -> Tensor:
    r"""The probability that at least one of k completions of a prompt succeeds.

    From n completions, c of them successes, without bias:
    :math:`1 - \binom{n-c}{k} / \binom{n}{k}` (Chen et al., arXiv 2107.03374, equation 1).

    Args:
        successes: [P, n] bool.
        k: completions that one may try.

    Returns:
        [P] fp64.

    Raises:
        ValueError: another shape or dtype, k below 1 or above n.
    """
    _check(successes)
    n = successes.shape[1]
    if not 1 <= k <= n:
        raise ValueError(
            f"pass@k needs k from 1 to the number of completions per prompt, got k={k} and {n} "
            f"completions: draw more of them or ask for another k"
        )
    # C(n-c, k) / C(n, k) is the product over j < c of (n-k-j) / (n-j): no large numbers.
    left = torch.arange(n, 0, -1, dtype=torch.float64, device="cpu")
    fails = torch.cumprod((left - k).clamp(min=0) / left, dim=0)
    by_successes = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), 1 - fails])
    return by_successes[successes.sum(dim=1).cpu()]


def average_at_n(successes: Tensor) -> Tensor:
    """The share of a prompt's completions that succeed.

    Args:
        successes: [P, n] bool.

    Returns:
        [P] fp64.
    """
    _check(successes)
    return successes.cpu().to(torch.float64).mean(dim=1)


def majority_at_n(successes: Tensor, answers: Sequence[Sequence[str | None]]) -> Tensor:
    """The success of a prompt's most frequent answer (Wang et al., arXiv 2203.11171).

    None, no answer, has no vote; a prompt without any answer fails. Among equally frequent answers
    the one given first wins. Success may depend on more than the answer, on the format for
    instance, so completions with the winning answer can differ in it: then the value is their
    mean, what one of them drawn by lot scores.

    Args:
        successes: [P, n] bool.
        answers: P lists of n answers, equal strings where they mean the same.

    Returns:
        [P] fp64.

    Raises:
        ValueError: another shape or dtype, or answers that do not match the completions.
    """
    _check(successes)
    prompts, n = successes.shape
    if list(map(len, answers)) != [n] * prompts:
        raise ValueError(
            f"maj@n needs an answer or None for each of {n} completions of {prompts} prompts, got "
            f"lists of {list(map(len, answers))}"
        )
    rows = zip(successes.tolist(), answers, strict=True)
    return torch.tensor([_majority(*row) for row in rows], dtype=torch.float64, device="cpu")


def _majority(successes: Sequence[bool], answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winner = max(votes, key=votes.__getitem__)  # of equals the first
    chosen = [ok for ok, answer in zip(successes, answers, strict=True) if answer == winner]
    return sum(chosen) / len(chosen)


def _check(successes: Tensor) -> None:
    if successes.ndim != 2 or successes.shape[1] == 0 or successes.dtype != torch.bool:
        raise ValueError(
            f"successes must be [prompts, completions] bool with at least one completion, got "
            f"{list(successes.shape)} {successes.dtype}"
        )


# Means over prompts, for `self.log(name, metric)` in any LightningModule.


class PromptMean(Metric):
    """Base of the metrics: the mean of one value per prompt, NaN where there were no prompts.

    `total` is fp64 and `count` int64, on whatever device the metric is moved to. No cast changes
    them, so a metric may live in a module that is trained in bf16; a state_dict has neither.

    Args:
        options: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("count", zero.to(torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """[] fp64, the mean over all prompts of all ranks."""
        return self.total / self.count

    def _add(self, values: Tensor) -> None:
        """Add [P] values."""
        self.total += values.sum().to(self.total)
        self.count += len(values)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> nn.Module:
        """Move the states where `fn` moves tensors, without its cast, which would round them."""
        return super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), exclude_state)


class PassAtK(PromptMean):
    """pass@k: the mean over prompts of `pass_at_k`.

    Args:
        k: completions that one may try.
        options: of `torchmetrics.Metric`.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__(**options)
        self.k = _positive(k)

    def update(self, successes: Tensor) -> None:
        """Add P prompts: [P, n] bool, with n of at least k."""
        self._add(pass_at_k(successes, self.k))


class AverageAtN(PromptMean):
    """avg@n: the mean over prompts of `average_at_n`."""

    def update(self, successes: Tensor) -> None:
        """Add P prompts: [P, n] bool."""
        self._add(average_at_n(successes))


class MajorityAtN(PromptMean):
    """maj@n: the mean over prompts of `majority_at_n`, which says who wins."""

    def update(self, successes: Tensor, answers: Sequence[Sequence[str | None]]) -> None:
        """Add P prompts: [P, n] bool, and P lists of n answers."""
        self._add(majority_at_n(successes, answers))


class EvalMetrics:
    """What a validation says, over all prompts and for each source of prompts.

    It is no `nn.Module`, so a `LightningModule` holds it as a plain attribute
    (`self.eval_metrics = EvalMetrics(ks)`), where it enters no state_dict and is neither cast nor
    moved. Call `reset()` when a validation begins, `update()` for each batch and at the end
    `compute()`, on every rank: the values are those of all ranks, to be logged without `sync_dist`.

    Args:
        ks: which pass@k to compute beside pass@1, none above the number of completions per prompt.

    Raises:
        ValueError: a k below 1.
    """

    def __init__(self, ks: Sequence[int] = ()) -> None:
        self.ks = sorted({1, *map(_positive, ks)})
        self.reset()

    def reset(self) -> None:
        """Forget all prompts."""
        self._n = 0
        # (source, name) to the sum over prompts and their number, in plain numbers: ranks may have
        # seen other sources, and exchange these whatever the device or the backend.
        self._sums: dict[tuple[str | None, str], tuple[float, int]] = {}

    def update(
        self,
        rewards: Tensor,
        success_reward: float,
        lengths: Tensor,
        truncated: Tensor,
        answers: Sequence[Sequence[str | None]] | None,
        sources: Sequence[str | None],
    ) -> None:
        """Add P prompts with n completions each; n stays the same until `reset()`.

        Args:
            rewards: [P, n] fp32.
            success_reward: a completion with at least this reward is a success.
            lengths: [P, n], completion tokens.
            truncated: [P, n] bool, whether a completion was cut off.
            answers: P lists of n answers, see `majority_at_n`; None leaves maj@n out.
            sources: P names of where the prompts come from; None is no source.

        Raises:
            ValueError: shapes that do not fit, another n than before, or a k above n.
        """
        shapes = [list(values.shape) for values in (rewards, lengths, truncated)]
        if rewards.ndim != 2 or shapes[1:] != shapes[:-1] or len(sources) != len(rewards):
            raise ValueError(
                f"rewards, lengths and truncated must be [prompts, completions] and sources one "
                f"name per prompt, got {shapes} and {len(sources)} sources"
            )
        n = rewards.shape[1]
        if self._n not in (0, n):
            raise ValueError(
                f"a validation must draw equally many completions of each prompt, got {n} after "
                f"{self._n}"
            )
        self._n = n
        successes = rewards >= success_reward
        values = {f"pass@{k}": pass_at_k(successes, k) for k in self.ks}
        if n > 1:
            values[f"avg@{n}"] = average_at_n(successes)
            if answers is not None:
                values[f"maj@{n}"] = majority_at_n(successes, answers)
        plain = {"reward": rewards, "length": lengths, "truncated_frac": truncated}
        values |= {k: v.cpu().to(torch.float64).mean(dim=1) for k, v in plain.items()}
        for name, per_prompt in values.items():
            for source, value in zip(sources, per_prompt.tolist(), strict=True):
                self._add(self._sums, (source, name), value, 1)

    def compute(self) -> dict[str, float]:
        """Means over the prompts of all ranks; every rank must call it.

        Returns:
            `pass@1` and each `pass@k`, with n > 1 completions per prompt also `avg@<n>` and
            `maj@<n>`, then `reward`, `length` (tokens) and `truncated_frac`. Where the prompts come
            from more than one source, the same of each, as `<source>/<name>`. Empty without
            prompts.
        """
        total: dict[tuple[str | None, str], tuple[float, int]] = {}
        by_source: dict[tuple[str | None, str], tuple[float, int]] = {}
        for sums in of_all_ranks(self._sums):
            for (source, name), (value, count) in sums.items():
                self._add(total, (None, name), value, count)
                self._add(by_source, (source, name), value, count)
        means = {name: value / count for (_, name), (value, count) in total.items()}
        if len({source for source, _ in by_source}) > 1:
            for (source, name), (value, count) in by_source.items():
                if source is not None:
                    means[f"{source}/{name}"] = value / count
        return means

    @staticmethod
    def _add(sums: dict[Any, tuple[float, int]], key: Any, value: float, count: int) -> None:
        before = sums.get(key, (0.0, 0))
        sums[key] = (before[0] + value, before[1] + count)


def _positive(k: int) -> int:
    if k < 1:
        raise ValueError(f"pass@k needs a k of at least 1, got {k}")
    return k
