"""A reward or an engine that fails ends the run with its reason; it goes on from the last step."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY_POLICY, write_sums
from tests.faults.fault_run import children
from tests.warm import Program, Warm

pytestmark = pytest.mark.faults

TORCH_ENGINE = "logra_lightning.engines.TorchEngine"


def begin(
    warm: Warm,
    folder: Path,
    *options: str,
    reward: str = "",
    hang_s: float = 600,
    environment: dict[str, str] | None = None,
) -> Program:
    """A run on the command line, which goes on from the last checkpoint in `folder`."""
    digits = {"class_path": "tests.faults.misdeeds.Digits", "init_args": {"misdeed": reward}}
    saves = {"dirpath": str(folder / "saved"), "every_n_train_steps": 1}
    config = {
        "model": {
            "model": str(TINY_POLICY),
            "rewards": [{"function": digits, "hang_s": hang_s}],
            "group_size": 4,
            "sampling": {"max_tokens": 6},
        },
        "data": {
            "class_path": "logra_lightning.data.PromptDataModule",
            "init_args": {"path": write_sums(folder / "sums.jsonl", 24), "prompts_per_step": 4},
        },
        "validate_at_ends": {"enabled": False},
        "engine_check": {"enabled": False},  # the engine is called once per batch
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": {
                "class_path": "logra_lightning.strategy.SketchStrategy",
                "init_args": {"rank": 32},
            },
            "max_epochs": -1,
            "limit_val_batches": 0,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "logra_lightning.callbacks.StepCheckpoint", "init_args": saves}
            ],
        },
        "ckpt_path": "last",
    }
    (folder / "run.json").write_text(json.dumps(config))
    return warm.begin(
        "logra_lightning",
        *("fit", "--config", "run.json", *options),
        output=folder / "output.txt",
        cwd=folder,
        environment=environment,
    )


def steps_saved(folder: Path) -> int:
    return int(torch.load(folder / "saved" / "last.ckpt", weights_only=True)["global_step"])


def assert_goes_on(warm: Warm, folder: Path, engine: str = TORCH_ENGINE) -> None:
    run = begin(warm, folder, f"--model.engine={engine}", "--trainer.max_steps=4")
    code, output = run.finish(100)
    assert code == 0, output
    assert steps_saved(folder) == 4


@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [
        pytest.param("raise", "raised KeyError for row", marks=pytest.mark.slow),
        ("hang", "overran its time limit for row"),
        pytest.param("nonsense", "returned 'a lot' for row", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_ends_the_run_in_one_line(
    warm: Warm, tmp_path: Path, misdeed: str, reason: str
) -> None:
    options = [f"--model.engine={TORCH_ENGINE}", "--trainer.max_steps=4"]
    run = begin(warm, tmp_path, *options, reward=misdeed, hang_s=1)
    code, output = run.finish(100)
    assert code == 1, output
    assert f"error: reward 'Digits' {reason}" in output
    assert "Traceback" not in output
    assert steps_saved(tmp_path) == 2
    if misdeed == "hang":
        assert_goes_on(warm, tmp_path)


def test_an_engine_that_fails_ends_the_run_with_its_reason(warm: Warm, tmp_path: Path) -> None:
    engine = "tests.faults.misdeeds.DyingEngine"
    run = begin(warm, tmp_path, f"--model.engine={engine}", "--trainer.max_steps=4")
    code, output = run.finish(100)
    assert code == 1, output
    assert "RuntimeError: the engine is gone" in output
    assert steps_saved(tmp_path) == 2


@pytest.mark.vllm
@pytest.mark.slow
def test_a_vllm_process_that_is_killed_ends_the_run_in_one_line(warm: Warm, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    engine = [
        "--model.engine=logra_lightning.engines.VLLMEngine",
        "--model.engine.init_args.kv_cache_memory_bytes=67108864",
    ]
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run = begin(warm, tmp_path, *engine, "--trainer.max_steps=100000", environment=apart)
    last = tmp_path / "saved" / "last.ckpt"
    while not last.exists():
        assert run.poll() is None, run.output.read_text()
        time.sleep(0.1)
    (core,) = (pid for pid in children(run.pid) if "EngineCore" in name_of(pid))
    os.kill(core, signal.SIGKILL)
    start = time.monotonic()
    code, output = run.finish(100)
    assert time.monotonic() - start < 60
    assert code == 1, output
    assert "error: vLLM's process died" in output
    assert "Traceback" not in output
    steps = steps_saved(tmp_path)
    assert steps >= 1
    again = f"--trainer.max_steps={steps + 1}"
    code, output = begin(warm, tmp_path, *engine, again, environment=apart).finish(100)
    assert code == 0, output
    assert steps_saved(tmp_path) == steps + 1


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
