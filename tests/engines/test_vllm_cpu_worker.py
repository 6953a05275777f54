"""On CPUs vLLM computes with plain weights, also where its kernels would take packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


def test_a_convolution_gets_its_plain_weight_and_is_told_so() -> None:
    from logra_lightning.engines.vllm_cpu_worker import plain_convolution

    weight, seen = torch.arange(12.0).view(3, 1, 4), []

    def convolution(*, x: Tensor, **inputs: Any) -> Tensor:
        seen.append(inputs)
        return x

    x = torch.ones(2)
    assert plain_convolution(convolution)(x=x, weight=weight, is_weight_packed=True, bias=None) is x
    (inputs,) = seen
    assert torch.equal(inputs["weight"], weight[:, 0])
    assert inputs["is_weight_packed"] is False
    assert inputs["bias"] is None


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernel needs a CPU with bf16"
)
def test_the_kernel_of_a_plain_weight_is_a_convolution_over_the_last_tokens() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from logra_lightning.engines.vllm_cpu_worker import compute_with_plain_convolutions

    compute_with_plain_convolutions()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 1, 4, generator=generator).to(torch.bfloat16)
    x = torch.randn(64, 9, generator=generator).to(torch.bfloat16)
    found = gdn_attention._causal_conv1d_fwd_cpu(
        x=x.T.contiguous().T,
        weight=weight,
        bias=None,
        conv_states=torch.zeros(1, 3, 64, dtype=torch.bfloat16).transpose(1, 2),
        query_start_loc=torch.tensor([0, 9], dtype=torch.int32),
        cache_indices=torch.tensor([0], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        silu_activation=False,
        is_weight_packed=True,
    )
    padded = torch.nn.functional.pad(x.float(), (3, 0))
    expected = torch.stack([(padded[:, i : i + 4] * weight[:, 0].float()).sum(1) for i in range(9)])
    torch.testing.assert_close(found.float(), expected.T, rtol=0.02, atol=0.02)
