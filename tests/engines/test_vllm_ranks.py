"""Two ranks with an engine each: the trainer's process group comes first, and outlives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import run_ranks

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.dist]

SCRIPT = """
import torch, torch.distributed as dist
from tests.tiny_vllm import PROMPTS, Trainer, errors, make_engine, make_policy
from logra_lightning.types import SamplingParams

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer, engine = Trainer(make_policy()), make_engine()

    def total() -> float:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        return value.item()

    for _ in range(2):  # also a second engine in the same process
        engine.start(trainer.policy, [1])
        engine.load(trainer.weights(), version=trainer.version)
        engine.merge([trainer.step(), trainer.step()])
        assert engine.differing(trainer.weights()) == []
        assert errors(engine, trainer.policy, seed=rank).max() < 1e-4
        prompts = [[*PROMPTS[0], 11 + rank]]
        group = engine.generate(prompts, SamplingParams(8), num_completions=4, seed=rank)[0]
        drawn = [None, None]
        dist.all_gather_object(drawn, [c.token_ids for c in group])
        assert drawn[0] != drawn[1]
        assert total() == 3.0
        engine.close()
        assert dist.get_world_size() == 2
        assert total() == 3.0
    print(f"rank {rank} done")
"""


def test_each_of_two_ranks_has_its_engine(tmp_path: Path) -> None:
    run_ranks(SCRIPT, tmp_path)
