"""Measures each way to update a vLLM engine, and whether our engine samples as fast as vLLM alone.

    python benchmarks/weight_sync.py --model FOLDER

The first table has the bytes and seconds of the modes of `WeightSync`, beside vLLM's own
`reload_weights`, which everybody else uses. The second table has the tokens per second of
`VLLMEngine`, beside a bare `vllm.LLM` as it comes (weights packed on a CPU, no logprobs) and like
for like (plain weights, a logprob for each token). All engines run in one process, sample
completions of equal length, and take turns in each round.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra_lightning.engines import PolicyWeight, VLLMEngine
from logra_lightning.engines.process_state import process_as_it_was
from logra_lightning.policy.load import load_policy
from logra_lightning.sketch import Factors, SketchBank, find_targets, merge_
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import SamplingParams

TINY = Path(__file__).parent.parent / "examples" / "tiny_policy"
QUESTION = "State the final answer to the following arithmetic problem: {} + 4 - 3 ="
PROMPTS, GROUP = 16, 8
ON_CPU = not torch.cuda.is_available()
CACHE_BYTES = 1 << 30  # key-value cache of each engine
OURS, BARE, LIKE = "VLLMEngine", "vllm.LLM", "vllm.LLM, like for like"
TARGET = 0.95  # least share of the like-for-like engine's tokens per second

Row = dict[str, Any]


class Trainer:
    """A policy, its exact masters, and updates as an optimizer would make them."""

    def __init__(self, policy: Any, rank: int) -> None:
        self.policy = policy
        modules = find_targets(policy)
        self.narrowest = min(module.in_features for module in modules.values())
        self.sketches = SketchBank(modules, min(rank, self.narrowest), device=policy.device)
        self.residuals: dict[str, Tensor] = {}
        if policy.dtype == torch.bfloat16:
            for name, module in modules.items():
                self.residuals[name] = torch.zeros_like(module.weight, dtype=torch.int16)

    def weights(self) -> Iterator[PolicyWeight]:
        for name, parameter in self.policy.named_parameters():
            yield PolicyWeight(name, parameter.data)

    def masters(self) -> Iterator[PolicyWeight]:
        """All weights, with what the engine needs so that it can merge factors later."""
        sketched = {layer.name for layer in self.sketches}
        for weight in self.weights():
            name = weight.name.removesuffix(".weight")
            residual = self.residuals.get(name)
            projection = name if name in sketched else None
            yield PolicyWeight(weight.name, weight.tensor, residual, projection)

    def factors(self, version: int) -> Factors:
        self.sketches.begin_step(version)
        directions = {}
        for layer in self.sketches:
            direction = torch.randn(layer.total.shape, dtype=torch.float32, device="cpu") * 1e-5
            directions[layer.name] = direction.to(layer.total.device, torch.bfloat16)
        return Factors(
            version, self.sketches.seed, version, self.sketches.projection, 1.0, directions
        )

    def merge(self, factors: Factors) -> None:
        for layer in self.sketches:
            direction = factors.directions[layer.name]
            residual = self.residuals.get(layer.name)
            merge_(layer.module.weight, direction, layer.entries, residual=residual)


def start_bare(model: str, dtype: str, max_model_len: int, **options: Any) -> Any:
    from vllm import LLM

    with process_as_it_was():
        return LLM(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=CACHE_BYTES,
            enforce_eager=ON_CPU,
            **options,
        )


def start_like_for_like(model: str, dtype: str, max_model_len: int) -> Any:
    options = {"logprobs_mode": "processed_logprobs"}
    if ON_CPU:
        options["worker_cls"] = "logra_lightning.engines.vllm_cpu_worker.PlainCPUWorker"
    return start_bare(model, dtype, max_model_len, **options)


def reload_weights(llm: Any, policy: Any) -> None:
    # state_dict has a tied head under its own name, without which vLLM keeps the old one.
    weights = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    options = {"weights_iterator": iter(weights.items()), "is_checkpoint_format": True}
    llm.collective_rpc("reload_weights", kwargs=options)
    llm.reset_prefix_cache()


def sample_bare(llm: Any, prompts: list[list[int]], tokens: int, logprobs: int | None) -> None:
    from vllm import SamplingParams as VLLMSamplingParams

    params = VLLMSamplingParams(
        n=GROUP,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        flat_logprobs=logprobs is not None,
    )
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    if not ON_CPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def sync_seconds(
    trainer: Trainer, engine: VLLMEngine, bare: Any, rounds: int
) -> dict[str, list[float]]:
    engine.share(copy.deepcopy(trainer.policy))
    seconds: dict[str, list[float]] = {}
    for round_ in range(rounds):
        version = 2 * round_ + 1
        engine.load(trainer.masters(), version=version - 1)
        first = trainer.factors(version - 1)  # not timed: the engine's residuals are new memory
        engine.merge([first])
        trainer.merge(first)
        factors = trainer.factors(version)
        ways: dict[str, Callable[[], Any]] = {
            "factors": partial(engine.merge, [factors]),
            "the trainer's own merge": partial(trainer.merge, factors),
            "dense": partial(engine.load, trainer.weights(), version=version + 1),
            "shared": partial(engine.refresh, version=version + 1),
            "vLLM reload_weights": partial(reload_weights, bare, trainer.policy),
        }
        for name, way in ways.items():
            if name == "dense" and round_ == rounds - 1:
                differing = engine.differing(trainer.masters())
                assert not differing, f"factors left other weights than the trainer's: {differing}"
            seconds.setdefault(name, []).append(seconds_of(way))
    return seconds


def sync_rows(model: str, dtype: str, trainer: Trainer, seconds: dict[str, list[float]]) -> list:
    dense = sum(parameter.nbytes for parameter in trainer.policy.parameters())
    factors = trainer.factors(0).nbytes
    sent = {"factors": factors, "dense": dense, "shared": 0, "vLLM reload_weights": dense}
    limit = dense * trainer.sketches.rank / trainer.narrowest
    return [
        {
            "model": Path(model).name,
            "dtype": dtype,
            "rank": trainer.sketches.rank,
            "mode": mode,
            "bytes": sent.get(mode),
            "ratio": sent[mode] / dense if mode in sent else None,
            "seconds": values,
            "within_limit": mode != "factors" or factors <= limit,
        }
        for mode, values in seconds.items()
    ]


def generate_rows(
    model: str, dtype: str, ways: dict[str, Callable[[int], Any]], tokens: int, rounds: int
) -> list[Row]:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    if not rounds:
        return []
    for round_ in range(-1, rounds):
        for name, way in ways.items():
            rate = PROMPTS * GROUP * tokens / seconds_of(partial(way, round_ + 1))
            if round_ >= 0:  # the round before warms up
                rates[name].append(rate)
    ours = statistics.median(rates[OURS])
    return [
        {
            "model": Path(model).name,
            "dtype": dtype,
            "engine": name,
            "tokens_per_s": values,
            "ours_to_it": ours / statistics.median(values),
        }
        for name, values in rates.items()
    ]


def measure(model: str, dtype: str, args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    tokenizer = load_tokenizer(model)
    prompts = [list(tokenizer(QUESTION.format(i))["input_ids"]) for i in range(PROMPTS)]
    policy: Any = load_policy(model, dtype=getattr(torch, dtype))
    trainer = Trainer(policy.to("cpu" if ON_CPU else "cuda"), args.rank)
    length = max(map(len, prompts)) + args.tokens
    engine = VLLMEngine(kv_cache_memory_bytes=CACHE_BYTES, max_model_len=length)
    engine.start(policy, [])  # nothing stops a completion, so all make as many tokens
    bare = start_bare(model, dtype, length)
    like = start_like_for_like(model, dtype, length)
    sampling = SamplingParams(args.tokens)
    ways: dict[str, Callable[[int], Any]] = {
        OURS: lambda r: engine.generate(prompts, sampling, num_completions=GROUP, seed=r),
        BARE: lambda _: sample_bare(bare, prompts, args.tokens, None),
        LIKE: lambda _: sample_bare(like, prompts, args.tokens, 0),
    }
    rates = generate_rows(model, dtype, ways, args.tokens, args.generate_rounds)
    syncs = sync_rows(model, dtype, trainer, sync_seconds(trainer, engine, bare, args.rounds))
    engine.close()
    for llm in (bare, like):
        llm.llm_engine.engine_core.shutdown()
    return syncs, rates


def print_syncs(syncs: list[Row]) -> None:
    print("| model | dtype | mode | bytes per sync | ratio to dense | median s |")
    print("|---|---|---|---|---|---|")
    for row in syncs:
        mode = row["mode"] + (f", rank {row['rank']}" if row["mode"] == "factors" else "")
        sent = "- | -" if row["bytes"] is None else f"{row['bytes']:,} | {row['ratio']:.3f}"
        seconds = statistics.median(row["seconds"])
        print(f"| {row['model']} | {row['dtype']} | {mode} | {sent} | {seconds:.5f} |")


def print_rates(rates: list[Row]) -> None:
    print(f"\n| model | dtype | engine | tokens per second | {OURS} to it |\n|---|---|---|---|---|")
    for row in rates:
        rate = statistics.median(row["tokens_per_s"])
        ratio = "" if row["engine"] == OURS else f"{row['ours_to_it']:.3f}"
        print(f"| {row['model']} | {row['dtype']} | {row['engine']} | {rate:.0f} | {ratio} |")
    print(f"target: {OURS} at least {TARGET} of {LIKE}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and seconds of a weight sync with vLLM.")
    parser.add_argument("--model", action="append", help="repeatable; default: the tiny policy")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--rank", type=int, default=64, help="at most the narrowest in_features")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--generate_rounds", type=int, default=5, help="0: no second table")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="the tiny policy, few rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    args = parser.parse_args()
    if args.quick:
        args.model, args.rounds, args.generate_rounds = [str(TINY)], 3, 2

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for bare engines too
    torch.manual_seed(0)
    syncs, rates = [], []
    for model in args.model or [str(TINY)]:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            more = measure(model, dtype, args)
            syncs += more[0]
            rates += more[1]
    print_syncs(syncs)
    if rates:
        print_rates(rates)
    if args.json:
        args.json.write_text(json.dumps({"sync": syncs, "generate": rates}, indent=2))
    like = [row["ours_to_it"] for row in rates if row["engine"] == LIKE]
    sent_little = all(row["within_limit"] for row in syncs)
    if args.check and not (sent_little and min(like, default=1.0) >= TARGET):
        sys.exit(1)


if __name__ == "__main__":
    main()
