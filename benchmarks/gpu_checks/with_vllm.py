"""With vLLM: logprobs, every way to sync, sleep, a second start."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_checks.quick_start import TINY, quick_start
from logra_lightning import EngineCheck, SamplingParams, VLLMEngine, WeightSync
from logra_lightning.engines.weights import PolicyWeight, named_parameters
from logra_lightning.policy import load_policy

CACHE_BYTES = 64 << 20


class Told(EngineCheck):
    """Remembers the differences that it found."""

    def check(self, *args: Any) -> float:
        found = super().check(*args)
        self.found = [*getattr(self, "found", []), found]
        return found


def engine(sleep: Any = "none") -> VLLMEngine:
    return VLLMEngine(kv_cache_memory_bytes=CACHE_BYTES, sleep=sleep)


def synced(report: Any, precision: str, mode: Any, sleep: str = "none") -> None:
    """Three steps; all bits are compared after each sync, and the engine is closed at the end."""
    name = f"{mode}, sleep {sleep}"
    with report.part(name):
        begun, check = time.perf_counter(), Told()
        callbacks = [WeightSync(mode, verify_every=1), check]
        run, _ = quick_start(report, precision, engine(sleep), callbacks, 3)
        moved = max(step["optim/step_scale"] for step in run.steps.values())
        report.need(moved > 0, f"{name}: no step changed a weight")
        report.figures[name] = {
            "logprob differences": check.found,
            "bytes": run.steps[3]["sync/bytes"],
            "sync_s": round(run.seconds["time/sync_s"], 5),
            "rollout_s": round(run.seconds["time/rollout_s"], 5),
            "whole_s": round(time.perf_counter() - begun, 1),
        }


def vllm_float32(report: Any) -> None:
    """Engine and trainer agree in fp32, and hold the same bits after every kind of sync."""
    for mode in ("factors",) if report.quick else ("factors", "shared", "dense"):
        synced(report, "32-true", mode)


def vllm_bfloat16(report: Any) -> None:
    """The same in bf16 with exact masters."""
    for mode in ("shared",) if report.quick else ("factors", "shared", "dense"):
        synced(report, "bf16-true", mode)


def vllm_sleep(report: Any) -> None:
    """An engine that is closed starts again, and one that sleeps wakes with what it had."""
    policy: Any = load_policy(TINY).to(report.device)
    made = engine()
    for start in ("first start", "second start"):
        with report.part(start):
            begun = time.perf_counter()
            made.start(policy, [])
            report.figures[f"{start}_s"] = round(time.perf_counter() - begun, 1)
            report.figures[start] = sample(made)
            made.close()
        report.figures[f"{start}, GiB left"] = left(report)
    known = report.figures.get("first start")
    report.need(report.figures.get("second start") == known, "the second start samples others")
    if report.device.type == "cpu":
        report.figures["sleep"] = "needs CUDA"
        return
    for sleep in ("kv", "weights"):
        with report.part(f"sleep {sleep}"):
            made = engine(sleep)
            made.start(policy, [])
            before = left(report)
            sample(made)
            made.sleep()
            report.figures[f"sleep {sleep} gives back GiB"] = round(before - left(report), 3)
            if sleep == "weights":
                weights = (PolicyWeight(n, p.data) for n, p in named_parameters(policy))
                made.load(weights, version=0)
            report.need(sample(made) == known, f"after sleep {sleep} it samples others")
            made.close()
            report.figures[f"sleep {sleep}, GiB left"] = left(report)
    for mode, sleep in (("factors", "kv"), ("shared", "kv"), ("dense", "weights")):
        synced(report, "bf16-true", mode, sleep)


def sample(made: VLLMEngine) -> list[list[int]]:
    """Tokens that depend on weights, arguments and seed alone."""
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10]]
    groups = made.generate(prompts, SamplingParams(12), num_completions=2, seed=0)
    return [completion.token_ids for group in groups for completion in group]


def left(report: Any) -> float:
    """GiB of the device that are in use, by anybody."""
    if report.device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(report.device)
    return round((total - free) / (1 << 30), 3)
