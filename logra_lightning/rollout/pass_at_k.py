"""How well a prompt is solved by several completions: pass@k, avg@n and maj@n.

The letters in shapes are P for prompts and n for completions per prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def pass_at_k(successes: Tensor, k: int) -> Tensor:
    r"""The probability that at least one of k completions of a prompt succeeds.

    It is estimated without bias from n completions, of which c succeed:

    .. math:: 1 - \binom{n-c}{k} \Big/ \binom{n}{k}

    With 1 success in 4 completions, pass@1 is .25, pass@2 is .5 and pass@4 is 1.

    Source: Chen et al., arXiv 2107.03374, equation 1.

    Args:
        successes: [P, n] bool, whether each completion succeeds.
        k: how many completions one may try; from 1 to n.

    Returns:
        [P] fp64 probabilities.

    Raises:
        ValueError: `successes` has another shape or dtype, or k is below 1 or above n.
    """
    _check(successes)
    n = successes.shape[1]
    if not 1 <= k <= n:
        raise ValueError(
            f"pass@k needs k from 1 to the number of completions per prompt, got k={k} and {n} "
            f"completions: draw more of them or ask for another k"
        )
    # C(n-c, k) / C(n, k) is the product over j < c of (n-k-j) / (n-j), which has no large numbers.
    left = torch.arange(n, 0, -1, dtype=torch.float64, device="cpu")
    fails = torch.cumprod((left - k).clamp(min=0) / left, dim=0)
    by_successes = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), 1 - fails])
    return by_successes[successes.sum(dim=1).cpu()]


def average_at_n(successes: Tensor) -> Tensor:
    """The share of a prompt's completions that succeed.

    Args:
        successes: [P, n] bool, whether each completion succeeds.

    Returns:
        [P] fp64 shares.

    Raises:
        ValueError: `successes` has another shape or dtype.
    """
    _check(successes)
    return successes.cpu().to(torch.float64).mean(dim=1)


def majority_at_n(successes: Tensor, answers: Sequence[Sequence[str | None]]) -> Tensor:
    """Whether the answer that most completions of a prompt give is right.

    Answers ["7", "7", "8", None], of which the first two succeed, give 1: "7" wins with two votes.
    None stands for no answer and has no vote; a prompt without any answer gives 0. Of answers with
    equally many votes, the one given first wins. Success may depend on more than the answer, for
    instance on the format. So some completions with the winning answer may succeed and others fail;
    the result is then the share that succeed.

    Source: Wang et al., arXiv 2203.11171.

    Args:
        successes: [P, n] bool, whether each completion succeeds.
        answers: P lists of n answers; two answers count as the same when the strings are equal.

    Returns:
        [P] fp64.

    Raises:
        ValueError: `successes` has another shape or dtype, or the answers do not match the
            completions.
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
    winner = max(votes, key=votes.__getitem__)  # the first of those with most votes
    chosen = [ok for ok, answer in zip(successes, answers, strict=True) if answer == winner]
    return sum(chosen) / len(chosen)


def _check(successes: Tensor) -> None:
    if successes.ndim != 2 or successes.shape[1] == 0 or successes.dtype != torch.bool:
        raise ValueError(
            f"successes must be [prompts, completions] bool with at least one completion, got "
            f"{list(successes.shape)} {successes.dtype}"
        )
