"""`TorchEngine`: samples from the very weights that are trained, in plain torch.

Nothing is copied, so there is nothing to sync. The model reads each prompt once for all of its
completions, and completions that have ended leave the batch. Weights that are sharded over
processes are gathered while it samples. For large models `VLLMEngine` is several times faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logra_lightning.distributed.sharding import gathered
from logra_lightning.types import Completion, SamplingParams


class TorchEngine:
    """Samples with a key-value cache from a `transformers` causal language model.

    Args:
        max_num_seqs: largest number of completions that are drawn at the same time; it bounds the
            memory of the key-value cache.

    Raises:
        ValueError: `max_num_seqs` is below 1.
    """

    def __init__(self, max_num_seqs: int = 256) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.max_num_seqs = max_num_seqs
        self.policy_version: int | None = None
        self.max_model_len: int | None = None
        self._policy: nn.Module | None = None
        self._stop_token_ids: list[int] = []

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """Sample from `policy` from now on."""
        self._policy = policy
        self._stop_token_ids = list(stop_token_ids)
        # transformers renamed it in 5.2x.
        parameters = inspect.signature(policy.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        num_completions: int,
        seed: int,
    ) -> list[list[Completion]]:
        """See `Engine.generate`; prompts of similar length are sampled side by side."""
        if self._policy is None:
            raise RuntimeError("the engine has no policy: call start first")
        device = next(self._policy.parameters()).device
        generator = torch.Generator(device=device).manual_seed(seed)
        was_training = self._policy.training
        # No dropout; and in training mode, transformers drops the cache of checkpointed layers.
        self._policy.eval()
        try:
            completions: list[list[Completion]] = [[] for _ in prompt_ids]
            with gathered(self._policy):
                for rows in _waves(prompt_ids, num_completions, self.max_num_seqs):
                    wave = [prompt_ids[row] for row, _ in rows]
                    counts = [count for _, count in rows]
                    drawn = iter(self._decode(wave, counts, sampling, generator, device))
                    for row, count in rows:
                        completions[row].extend(next(drawn) for _ in range(count))
            return completions
        finally:
            self._policy.train(was_training)

    def _decode(
        self,
        prompts: list[list[int]],
        counts: list[int],
        sampling: SamplingParams,
        generator: torch.Generator,
        device: torch.device,
    ) -> list[Completion]:
        """`counts[i]` completions of prompt i, those of the first prompt first.

        Prompts `[a, b]` with the counts `[2, 1]` give completions of `[a, a, b]`.
        """
        from logra_lightning.engines.torch_cache import reserved_cache, select_rows

        longest = max(map(len, prompts))
        policy: Any = self._policy
        cache = reserved_cache(policy.config, longest + sampling.max_tokens)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
        tokens = torch.full_like(mask, prompts[0][0])
        for i, ids in enumerate(prompts):  # padded on the left, so that all rows end together
            mask[i, longest - len(ids) :] = 1
            tokens[i, longest - len(ids) :] = torch.tensor(ids, dtype=torch.int64, device=device)
        logits = self._forward(tokens, mask, cache)

        repeats = torch.tensor(counts, dtype=torch.int64, device=device)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(repeats)
        select_rows(cache, rows)
        mask, logits = mask[rows], logits[rows]
        alive = torch.arange(len(rows), device=device)  # which completion each row is
        stops = torch.tensor(self._stop_token_ids, dtype=torch.int64, device=device)
        drawn = torch.zeros(len(rows), sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros_like(drawn, dtype=torch.float32)
        lengths = torch.full((len(rows),), sampling.max_tokens, dtype=torch.int64, device=device)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)
        uniform = torch.rand(drawn.shape, generator=generator, dtype=torch.float64, device=device)
        for position in range(sampling.max_tokens):
            token, logprob = sample(logits, sampling, uniform[alive, position])
            drawn[alive, position], logprobs[alive, position] = token, logprob
            ended = torch.isin(token, stops) & ~stopped[alive]
            stopped[alive[ended]] = True
            lengths[alive[ended]] = position + 1
            running = ~stopped[alive]
            if not running.any() or position + 1 == sampling.max_tokens:
                break
            # Removing rows copies the cache, so wait until that saves a quarter of the work.
            if running.sum() <= 0.75 * len(alive):
                keep = running.nonzero()[:, 0]
                select_rows(cache, keep)
                alive, mask, token = alive[keep], mask[keep], token[keep]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._forward(token[:, None], mask, cache)
        return [
            Completion(ids[:n], logprob[:n].clone(), truncated=not stop)
            for ids, logprob, n, stop in zip(
                drawn.tolist(), logprobs.cpu(), lengths.tolist(), stopped.tolist(), strict=True
            )
        ]

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """[n, V] fp32 logits of the last position; `tokens` [n, L] are added to the cache."""
        policy: Any = self._policy
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        output = policy(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        return output.logits[:, -1].to(torch.float32)


def sample(logits: Tensor, sampling: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, with its logprob under the distribution that it was drawn from.

    The token is the first one at which the cumulative distribution exceeds the random number. That
    needs one random number per token; one per entry of the vocabulary, as `torch.multinomial`
    draws, took longer than the model on a CPU.

    Args:
        logits: [n, V] fp32.
        sampling: temperature, `top_k` and `top_p`, which are applied in this order.
        uniform: [n] fp64 random numbers in [0, 1).

    Returns:
        [n] int64 tokens and [n] fp32 logprobs in nats. At temperature 0 these are the likeliest
        token and its logprob at temperature 1.
    """
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, torch.log_softmax(logits, dim=-1).gather(-1, token[:, None])[:, 0]
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # The first entry above the threshold, which never has probability zero.
    threshold = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def _waves(
    prompt_ids: Sequence[list[int]], num_completions: int, max_num_seqs: int
) -> Iterator[list[tuple[int, int]]]:
    """Which prompts to decode together, and how many completions of each: (prompt, count) pairs.

    Prompts of similar length come together. Two prompts with 3 completions each and at most 4
    completions at a time give `[(0, 3), (1, 1)], [(1, 2)]`.
    """
    wave: list[tuple[int, int]] = []
    room = max_num_seqs
    for row in sorted(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row])):
        left = num_completions
        while left:
            count = min(left, room)
            wave.append((row, count))
            left, room = left - count, room - count
            if room == 0:
                yield wave
                wave, room = [], max_num_seqs
    if wave:
        yield wave
