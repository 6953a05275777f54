"""Chunked logprobs equal the plain ones in value and gradient, for every kind of head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from logra_lightning.objective import Head, token_logprobs
from tests.peak import peak_bytes


def inputs(tokens: int = 23, vocabulary: int = 61, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, size, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


def plain_token_logprobs(
    hidden: Tensor, completion_ids: Tensor, head: Head, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once."""
    distribution = torch.log_softmax(head.logits(hidden) / temperature, dim=-1)
    logprobs = distribution.gather(-1, completion_ids[:, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(dim=-1).detach()


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (2.0, 5.0)])
def test_chunked_equals_plain_in_value_and_gradient(
    chunk: int, temperature: float, scale: float, softcap: float | None
) -> None:
    results = []
    for chunked in (True, False):
        hidden, weight, targets = inputs()
        bias = torch.linspace(-1, 1, 61).requires_grad_()
        head = Head(weight, bias, scale, softcap)
        if chunked:
            logprobs, entropy = token_logprobs(
                hidden, targets, head, temperature=temperature, chunk_tokens=chunk
            )
        else:
            logprobs, entropy = plain_token_logprobs(hidden, targets, head, temperature=temperature)
        (logprobs * torch.linspace(-1, 1, 23)).sum().backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad, bias.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_have_no_logprobs_and_yet_a_graph() -> None:
    hidden, weight, targets = inputs(tokens=0)
    logprobs, entropies = token_logprobs(hidden, targets, Head(weight), temperature=1.0)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_logits_never_exist_whole() -> None:
    hidden, weight, targets = inputs(tokens=64, vocabulary=500, size=4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor) and tensor.dim() == 2 and 500 in tensor.shape[1:]:
                    largest = max(largest, tensor.shape[0])
            return out

    with Watch():
        logprobs, _ = token_logprobs(hidden, targets, Head(weight), temperature=1.0, chunk_tokens=8)
        logprobs.sum().backward()
    assert largest == 8


def test_exact_logits_are_computed_in_fp32_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logra_lightning.objective.logprobs._EXACT_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 6, generator=generator).to(torch.bfloat16)
    bias = torch.randn(20, generator=generator).to(torch.bfloat16)
    hidden = torch.randn(5, 6, generator=generator)
    head = Head(weight, bias, scale=0.5, softcap=3.0)
    z = (hidden.double() @ weight.double().t() + bias.double()) * 0.5
    expected = torch.tanh(z / 3.0) * 3.0
    exact = head.exact_logits(hidden)
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-6)
    rounded = head.logits(hidden.to(torch.bfloat16)).double()
    assert (rounded - expected).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
def test_peak_memory_is_that_of_a_chunk_and_not_of_all_logits(entropy: bool) -> None:
    """Measured: 8,192 tokens, a vocabulary of 151,936, forward and backward."""
    tokens, vocabulary, chunk = 8192, 151_936, 64
    peak = peak_bytes(
        f"""
from logra_lightning.objective import Head, token_logprobs
hidden = torch.randn({tokens}, 8, requires_grad=True)
weight = torch.randn({vocabulary}, 8, requires_grad=True)
weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
ids = torch.randint({vocabulary}, ({tokens},))
""",
        f"""
logprobs, entropies = token_logprobs(
    hidden, ids, Head(weight), temperature=0.7, chunk_tokens={chunk}, entropy_gradient={entropy}
)
(logprobs.sum() + {float(entropy)} * entropies.sum()).backward()
""",
    )
    whole = tokens * vocabulary * 4
    assert peak < whole / 10
    assert peak > chunk * vocabulary * 4  # what cannot be avoided, so that the measure is one
