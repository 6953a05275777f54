"""Tokens per second of `TorchEngine` and of `transformers.generate` on the same prompts.

    python benchmarks/rollout_throughput.py --model FOLDER --dtype bfloat16

Eight prompts with eight completions each; the engine reads each prompt once. Rounds take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from logra_lightning.engines import TorchEngine
from logra_lightning.policy.load import load_policy
from logra_lightning.tokenizer import load_tokenizer
from logra_lightning.types import SamplingParams

TINY = Path(__file__).parent.parent / "examples" / "tiny_policy"
QUESTION = "State the final answer to the following arithmetic problem: {} + 4 - 3 ="
GROUP = 8


def engine_rate(policy: Any, prompts: list[list[int]], tokens: int, seed: int) -> float:
    engine = TorchEngine()
    engine.start(policy, [])  # nothing stops a completion, so both make as many tokens
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(tokens), num_completions=GROUP, seed=seed)
    return len(prompts) * GROUP * tokens / (time.perf_counter() - start)


def generate_rate(policy: Any, tokenizer: Any, prompts: list[list[int]], tokens: int) -> float:
    rows = [ids for ids in prompts for _ in range(GROUP)]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="left")
    padded.pop("token_type_ids", None)
    start = time.perf_counter()
    policy.generate(
        **padded,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        pad_token_id=0,
    )
    return len(rows) * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of TorchEngine.")
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 below 100 tokens per second")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 8, 1

    tokenizer = load_tokenizer(args.model)
    policy = load_policy(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompts = [list(tokenizer(QUESTION.format(i))["input_ids"]) for i in range(8)]
    engine_rate(policy, prompts[:1], 2, seed=0)  # first calls are slow
    rates: dict[str, list[float]] = {"TorchEngine": [], "transformers.generate": []}
    for round_ in range(args.rounds):
        rates["TorchEngine"].append(engine_rate(policy, prompts, args.tokens, round_))
        rates["transformers.generate"].append(
            generate_rate(policy, tokenizer, prompts, args.tokens)
        )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"| {args.dtype}, {policy.num_parameters():,} parameters | tokens per second |")  # type: ignore[operator]
    print("|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.0f} |")
    if args.json:
        args.json.write_text(json.dumps(rates, indent=2))
    if args.check and medians["TorchEngine"] < 100:
        sys.exit(1)


if __name__ == "__main__":
    main()
