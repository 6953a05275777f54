"""Where torchvision is missing it is stood in for, while one import lasts and for nothing else."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from logra_lightning.engines.vllm_text_only import _stand_in

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)


def test_names_of_any_depth_can_be_imported_and_are_gone_afterwards() -> None:
    with _stand_in():
        from torchvision.transforms.v2 import functional  # type: ignore[import-not-found]

        assert functional.resize is not None
    assert not any(name.startswith("torchvision") for name in sys.modules)
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        importlib.import_module("torchvision")


def test_transformers_is_not_told_that_it_is_there() -> None:
    from transformers.utils import is_torchvision_available

    with _stand_in():
        assert not is_torchvision_available()
    assert not is_torchvision_available()
