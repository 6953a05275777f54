"""One vLLM engine for most tests of a file; tests that need an engine of their own stand last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logra_lightning.engines import VLLMEngine
from tests.tiny_vllm import make_engine, make_policy


class Shared:
    """An fp32 engine, started when a test first asks for it; each test loads what it needs."""

    engine: VLLMEngine | None = None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    pytest.importorskip("vllm")
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture
def engine(shared: Shared) -> VLLMEngine:
    if shared.engine is None:
        shared.engine = make_engine()
        shared.engine.start(make_policy(), [1])
    return shared.engine


@pytest.fixture
def alone(shared: Shared) -> None:
    """Close the shared engine: vLLM runs one engine per process at a time."""
    shared.close()
