"""Success over several completions per prompt: pass@k, avg@n and maj@n of each prompt.

Shape letters: P prompts, n completions per prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


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
