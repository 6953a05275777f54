"""Engines of several ranks, one each or shared: exact weights, and exact when resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from logra_lightning.engines.vllm_group import EngineGroup
from tests.runs import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.vllm]
pytest.importorskip("vllm")

SCRIPT = """
from pathlib import Path
import torch
from lightning.pytorch import Callback
from logra_lightning import (
    KLBudget, SamplingParams, SketchAccumulation, TorchEngine, VLLMEngine, WeightSync,
)
from logra_lightning.callbacks import EngineCheck
from tests.ranks_run import STRATEGIES, own_folder
from tests.runs import data, policy, trainer, weights

class Save(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)

if __name__ == "__main__":
    folder = Path({folder!r})
    rank, mine = own_folder(folder)

    def fit(steps, strategy, precision, size, **options):
        engine = VLLMEngine(
            tensor_parallel_size=size, kv_cache_memory_bytes=16 << 20, max_model_len=64
        )
        module = policy(engine=engine)
        # Both raise where engine and trainer differ.
        checks = [WeightSync(verify_every=1), EngineCheck(every_n_steps=1)]
        made = trainer(
            mine, steps, devices=2, strategy=STRATEGIES[strategy](rank=32), precision=precision,
            callbacks=[SketchAccumulation(), KLBudget(), *checks, Save(folder / "half.ckpt")],
        )
        made.fit(module, datamodule=data(mine), **options)
        return module, made

    for strategy, precision, size in {cases!r}:
        straight, _ = fit(4, strategy, precision, size)
        resumed, _ = fit(4, strategy, precision, size, ckpt_path=folder / "half.ckpt")
        other = weights(resumed)
        for name, value in weights(straight).items():
            assert torch.equal(value, other[name]), (strategy, precision, size, name)
        assert len(straight.rollouts) == 8  # each rank trains on its own prompts
    # Greedy completions of a shared engine, of unequal shares.
    module = resumed
    plain = TorchEngine()
    plain.start(module.policy, [2])
    own = [[5, 6, 7], [8, 9]][: 2 - rank]
    prompts = [[i + 3 for i in ids] for ids in own] if rank else own
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    engine = VLLMEngine(
        tensor_parallel_size=2, kv_cache_memory_bytes=16 << 20, max_model_len=64
    )
    engine.start(module.policy, [2])
    for asked in (prompts, prompts if rank else []):
        expected = plain.generate(asked, greedy, num_completions=1, seed=0)
        found = engine.generate(asked, greedy, num_completions=1, seed=rank)
        assert [[c.token_ids for c in g] for g in found] == [
            [c.token_ids for c in g] for g in expected
        ]
    engine.close()
    print(f"rank {{rank}} done")
"""


def test_resuming_is_exact_with_an_engine_each_and_ranks_share_one(tmp_path: Path) -> None:
    cases = [("sketch_fsdp", "bf16-true", 1)]
    run_ranks(SCRIPT.format(folder=str(tmp_path), cases=cases), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resuming_is_exact_with_the_other_strategies_and_precisions(tmp_path: Path) -> None:
    cases = [
        ("sketch_fsdp", "32-true", 1),
        ("sketch_ddp", "bf16-true", 1),
        ("sketch_ddp", "32-true", 1),
        ("sketch_fsdp", "bf16-true", 2),
        ("sketch_ddp", "32-true", 2),
    ]
    run_ranks(SCRIPT.format(folder=str(tmp_path), cases=cases), tmp_path, timeout=580)


def test_processes_that_cannot_share_are_refused() -> None:
    with pytest.raises(
        ValueError, match="1 processes cannot share engines of 2 processes each: set model.engine"
    ):
        EngineGroup(2)
