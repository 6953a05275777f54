"""Full precision holds inside, and the caller's choice outside, also after an error."""

from __future__ import annotations

import pytest
import torch

from logra_lightning.sketch.precision import full_precision

CPU = torch.device("cpu")


def test_a_backends_own_setting_is_put_back() -> None:
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        with full_precision(CPU):
            assert backend.fp32_precision == "ieee"
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before


def test_autocast_and_lower_precision_are_off_inside() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with full_precision(CPU):
                assert torch.get_float32_matmul_precision() == "highest"
                assert torch.mm(x, x).dtype == torch.float32
            assert torch.mm(x, x).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"

        def fail() -> None:
            with full_precision(CPU):
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
