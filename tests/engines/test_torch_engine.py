"""TorchEngine samples what the policy says, with the logprobs of what it drew from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaForCausalLM, MistralConfig

from logra_lightning.engines import TorchEngine
from logra_lightning.engines.torch_engine import sample
from logra_lightning.types import Completion, SamplingParams
from tests.conftest import SIZES, make_llama
from tests.hybrids import HYBRIDS, make_hybrid

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13], [14, 15, 16, 17]]


def engine_of(
    model: LlamaForCausalLM, stops: list[int] | None = None, **options: int
) -> TorchEngine:
    engine = TorchEngine(**options)
    engine.start(model, stops or [])
    return engine


def plain_logprobs(model: LlamaForCausalLM, prompt: list[int], c: Completion, t: float) -> Tensor:
    """One forward pass of the whole sequence, without cache or padding."""
    ids = torch.tensor([prompt + c.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    distribution = torch.log_softmax(logits / t, dim=-1)[len(prompt) - 1 : -1]
    return distribution.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]


SMALL = SIZES | {"head_dim": 12, "sliding_window": 4}


@pytest.mark.parametrize(
    "config",
    [
        None,
        MistralConfig(**SMALL),
        Gemma3TextConfig(**SMALL, layer_types=["sliding_attention", "full_attention"]),
        *HYBRIDS,
    ],
    ids=["llama", "mistral-window", "gemma3-window", *HYBRIDS],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_equal_those_of_a_plain_forward(config: object, temperature: float) -> None:
    if isinstance(config, str):
        model = make_hybrid(config)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = None if config is None else AutoModelForCausalLM.from_config(config).eval()
        model = made or make_llama()
    sampling = SamplingParams(max_tokens=9, temperature=temperature)
    stops = list(range(0, 12))  # completions of many lengths
    groups = engine_of(model, stops, max_num_seqs=9).generate(
        PROMPTS, sampling, num_completions=5, seed=1
    )
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 5
        for c in group:
            torch.testing.assert_close(
                c.logprobs, plain_logprobs(model, prompt, c, temperature), rtol=1e-4, atol=1e-4
            )
            assert not any(token in stops for token in c.token_ids[:-1])
            assert c.truncated == (c.token_ids[-1] not in stops)
            assert len(c.token_ids) <= 9
            lengths.add(len(c.token_ids))
    assert len(lengths) > 3


def test_greedy_equals_transformers_generate(llama: LlamaForCausalLM) -> None:
    groups = engine_of(llama).generate(
        PROMPTS, SamplingParams(max_tokens=12, temperature=0.0), num_completions=1, seed=0
    )
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        expected = llama.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_same_seed_same_completions_and_the_global_state_is_left_alone(
    llama: LlamaForCausalLM,
) -> None:
    engine = engine_of(llama)
    state = torch.get_rng_state()

    def draw(seed: int) -> list[list[list[int]]]:
        groups = engine.generate(PROMPTS, SamplingParams(8), num_completions=4, seed=seed)
        return [[c.token_ids for c in group] for group in groups]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({tuple(ids) for group in draw(1) for ids in group}) == 16
    assert torch.equal(torch.get_rng_state(), state)


def test_training_mode_is_restored_even_after_an_error(llama: LlamaForCausalLM) -> None:
    llama.train()
    engine = engine_of(llama)
    engine.generate([[1]], SamplingParams(2), num_completions=1, seed=0)
    assert llama.training
    with pytest.raises(IndexError):
        engine.generate([[1000]], SamplingParams(2), num_completions=1, seed=0)
    assert llama.training


def test_end_of_sequence_equal_to_padding_ends_a_completion(llama: LlamaForCausalLM) -> None:
    """Token 0 both pads and stops: only a drawn one ends the completion."""
    groups = engine_of(llama, list(range(0, 61))).generate(
        [[0, 5, 0], [7]], SamplingParams(5), num_completions=2, seed=0
    )
    assert all(len(c.token_ids) == 1 and not c.truncated for group in groups for c in group)


def frequencies(logits: Tensor, sampling: SamplingParams, draws: int = 20_000) -> Tensor:
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(draws, -1), sampling, uniform)
    for token in tokens.unique():
        assert logprobs[tokens == token].unique().numel() == 1
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


def test_tokens_are_drawn_as_often_as_their_probability() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf])
    p = torch.softmax(logits / 0.7, dim=-1)
    found = frequencies(logits, SamplingParams(temperature=0.7))
    assert (found - p).abs().max() < 5 * 0.5 / 20_000**0.5
    assert found[4] == 0


def test_top_k_and_top_p_renormalize_what_is_left() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    found = frequencies(logits, SamplingParams(top_k=2))
    torch.testing.assert_close(found, torch.tensor([0, 0, 3, 4]) / 7, atol=0.02, rtol=0)
    found = frequencies(logits, SamplingParams(top_p=0.6))  # .4 is not enough, .4 + .3 is
    torch.testing.assert_close(found, torch.tensor([0, 0, 3, 4]) / 7, atol=0.02, rtol=0)
    assert frequencies(logits, SamplingParams(top_p=0.01)).tolist() == [0, 0, 0, 1]
    token, logprob = sample(
        logits[None], SamplingParams(top_k=2), torch.tensor([0.99], dtype=torch.float64)
    )
    assert token.item() == 3
    assert logprob.item() == pytest.approx(torch.tensor(4 / 7).log().item())


def test_without_a_policy_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="call start first"):
        TorchEngine().generate([[1]], SamplingParams(), num_completions=1, seed=0)


def test_no_room_for_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        TorchEngine(max_num_seqs=0)
