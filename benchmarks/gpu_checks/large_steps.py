"""Steps of large models: launches, the share of the KL probe, peaks of memory.

They have random weights and completions that nobody samples, so nothing is downloaded.
"""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from gpu_checks.quick_start import TINY, Record, trainer
from logra_lightning import (
    KLBudget,
    MemoryOptions,
    PolicyModule,
    PromptBatch,
    Reward,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
)
from logra_lightning.policy import checkpoint_activations_
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import Completion

PROMPT = list(range(3, 19)) * 2  # ids of the tiny policy's tokenizer


class Made:
    """An engine whose completions are random tokens of one length; it samples from no model."""

    policy_version: int | None = None
    max_model_len: int | None = None

    def start(self, policy: Any, stop_token_ids: Sequence[int]) -> None:
        self.size = policy.config.vocab_size

    def generate(
        self, prompt_ids: Any, sampling: SamplingParams, *, num_completions: int, seed: int
    ) -> list[list[Completion]]:
        generator = torch.Generator().manual_seed(seed)
        count = sampling.max_tokens
        logprobs = torch.full((count,), -math.log(self.size), dtype=torch.float32, device="cpu")

        def one() -> Completion:
            ids = torch.randint(self.size, (count,), generator=generator, device="cpu")
            return Completion(ids.tolist(), logprobs, truncated=True)

        return [[one() for _ in range(num_completions)] for _ in prompt_ids]

    def sleep(self) -> None:
        """Nothing is held."""

    close = sleep


class Drop(Callback):
    """Lets go of weights and state at the end, which Lightning would copy to the host."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.policy, trainer.strategy.optimizers = None, []


def first_token(completion_ids: list[int]) -> float:
    return float(completion_ids[0])


class RandomPolicy(PolicyModule):
    """A Qwen2 of random weights, which are made where they are trained."""

    def __init__(self, sizes: dict[str, Any], **options: Any) -> None:
        super().__init__(TINY, [Reward(first_token)], engine=Made(), seed=0, **options)
        self.sizes = sizes

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM, Qwen2Config

        if self.policy is None:
            self.tokenizer = load_tokenizer(TINY)
            dtype = torch.get_default_dtype()
            config = Qwen2Config(**self.sizes, eos_token_id=2)
            with self.trainer.strategy.root_device:
                self.policy = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            if self.memory.activation_checkpointing:
                checkpoint_activations_(self.policy)
        super().configure_model()


def qwen(report: Any, size: str) -> dict[str, Any]:
    """Sizes of Qwen2.5-1.5B or 7B, or tiny ones."""
    width, inner, heads, kv, vocabulary, layers = {
        "1.5B": (1536, 8960, 12, 2, 151_936, 28),
        "7B": (3584, 18_944, 28, 4, 152_064, 28),
    }[size]
    if report.quick:
        width, inner, heads, kv, vocabulary, layers = 64, 96, 4, 2, 211, 2
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": size == "1.5B",
    }


def steps_of(report: Any, size: str, strategy: Any, precision: str, callbacks: Sequence[Any], *,
             rollouts: int = 2, steps: int = 2, checkpointing: bool = False) -> Record:  # fmt: skip
    """Steps on rollouts of 1,024 tokens, 2,048 in a microbatch."""
    length = 64 if report.quick else 1024
    module = RandomPolicy(
        qwen(report, size),
        group_size=rollouts,
        sampling=SamplingParams(max_tokens=length - len(PROMPT)),
        memory=MemoryOptions(2 * length, checkpointing),
    )
    record = Record()
    run = trainer(report, steps, precision, [*callbacks, record, Drop()], strategy=strategy)
    prompts = [PromptBatch([PROMPT]) for _ in range(steps)]
    run.fit(module, train_dataloaders=DataLoader(prompts, batch_size=None))  # type: ignore[arg-type]
    if isinstance(strategy, SketchStrategy):
        scale = record.steps[steps]["optim/step_scale"]
        report.need(scale > 0, f"{size}, {precision}: the last step changed nothing")
    return record


def sketches(report: Any) -> SketchStrategy:
    return SketchStrategy(rank=16 if report.quick else 256)


def free(report: Any) -> None:
    gc.collect()
    if report.device.type == "cuda":
        torch.cuda.empty_cache()


class Launches(Callback):
    """Counts what the host asks of the GPU in one phase of one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.counts: dict[str, dict[str, int]] = {}
        self.running: Any = None

    def begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.running = profile(activities=activities)
        self.running.start()

    def end(self, phase: str) -> None:
        self.running.stop()
        counts = {"launches": 0, "synchronizations": 0, "copies to the host": 0, "operators": 0}
        for event in self.running.key_averages():
            for part, kind in (
                ("LaunchKernel", "launches"),
                ("Synchronize", "synchronizations"),
                ("Memcpy DtoH", "copies to the host"),
                ("aten::", "operators"),
            ):
                if part in event.key:
                    counts[kind] += event.count
        self.counts[phase], self.running = counts, None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.begin()

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if self.running is not None:
            self.end("train")
            self.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.running is not None:
            self.end("update")


def launches(report: Any) -> None:
    """Launches and synchronizations of one step at 1.5B, before the update and in it."""
    counting = Launches(step=1)
    callbacks = [SketchAccumulation(), counting, KLBudget(bf16_every=0)]
    with report.part("bf16-true"):
        steps_of(report, "1.5B", sketches(report), "bf16-true", callbacks)
    report.figures.update(counting.counts)
    asked = sum(counting.counts.get("train", {}).values())
    report.need(asked > 0, "the profiler saw nothing")


def kl_share(report: Any) -> None:
    """Seconds of the KL probe in a step of 8 x 1,024 tokens at 1.5B, all of them its probe."""
    callbacks = [SketchAccumulation(), KLBudget(bf16_every=0)]
    for checkpointing in (False, True):
        name = "checkpointed" if checkpointing else "plain"
        with report.part(name):
            options = {"rollouts": 8, "steps": 3, "checkpointing": checkpointing}
            run = steps_of(report, "1.5B", sketches(report), "bf16-true", callbacks, **options)
            seconds = {key[5:]: round(value, 4) for key, value in run.seconds.items()}
            share = run.seconds["time/kl_s"] / run.seconds["time/step_s"]
            report.figures[name] = {"share": round(share, 4)} | seconds
        free(report)


class Peaks(Callback):
    """Largest bytes since the last mark; on a CPU the process's peak, which never falls."""

    def __init__(self, report: Any, phase: str, found: dict[str, float]) -> None:
        self.device, self.phase, self.found = report.device, phase, found

    def mark(self, phase: str) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.found[phase] = max(self.found.get(phase, 0.0), round(peak / (1 << 30), 3))

    def on_train_start(self, *_: Any) -> None:
        if self.phase == "train":
            self.mark("start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.mark(self.phase)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.phase == "probe":
            self.mark("merge")


def peaks(report: Any, size: str, variants: Sequence[tuple[str, str, bool]]) -> None:
    for kind, precision, checkpointing in variants:
        name = f"{kind}, {precision}" + (", checkpointed" if checkpointing else "")
        found: dict[str, float] = {}
        with report.part(name):
            free(report)
            if report.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(report.device)
            marks = [Peaks(report, phase, found) for phase in ("train", "probe")]
            begun = time.perf_counter()
            callbacks = [SketchAccumulation(), marks[0], KLBudget(bf16_every=0), marks[1]]
            strategy = sketches(report) if kind == "sketches" else "auto"
            report.figures[name] = found
            options = {"checkpointing": checkpointing}
            try:
                run = steps_of(report, size, strategy, precision, callbacks, **options)
            except torch.OutOfMemoryError as error:
                if kind == "sketches":
                    raise
                found["out of memory"] = str(error)[:120]
                continue
            found["train_s"] = round(run.seconds["time/train_s"], 4)
            found["step_s"] = round(run.seconds["time/step_s"], 4)
            found["whole_s"] = round(time.perf_counter() - begun, 1)


def peaks_1b(report: Any) -> None:
    """GiB at 1.5B by phase, and seconds of a second step, of sketches and of dense AdamW."""
    sketched = [("sketches", "bf16-true", checkpointing) for checkpointing in (True, False)]
    dense = [("dense AdamW", "bf16-mixed", checkpointing) for checkpointing in (True, False)]
    peaks(report, "1.5B", [*sketched, *dense, ("dense AdamW", "bf16-true", True)])


def peaks_7b(report: Any) -> None:
    """The same at 7B; dense AdamW where 16 bytes per weight and their activations are free."""
    variants = [("sketches", "bf16-true", checkpointing) for checkpointing in (True, False)]
    room = 0
    if report.device.type == "cuda":
        room, _ = torch.cuda.mem_get_info(report.device)
    report.figures["free GiB"] = round(room / (1 << 30), 1)
    if room > 130 * (1 << 30):
        variants.append(("dense AdamW", "bf16-mixed", True))
    peaks(report, "7B", variants)
