"""Owns the tiny policy of the examples: a Llama that half-knows how to add and subtract digits.

It trains 0.3M parameters from scratch, in about a minute on two CPU cores, on three-digit problems
as reasoning_gym's chain_sum words them: first on right answers, then on those of a careless teacher
who is one too high half of the time. So it is right about as often, and reinforcement learning can
mend it. The result is an ordinary Hugging Face folder.

    python examples/make_tiny_policy.py --output_dir examples/tiny_policy
"""

import argparse
import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TASK = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
INSTRUCTION = "State the final answer to the following arithmetic problem:"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = " +-=0123456789"
# Share of the steps, at the end, on the careless teacher's answers.
CARELESS_STEPS = 0.15
CARELESS_LEARNING_RATE = 5e-4
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
HELD_OUT = 500
HELD_OUT_SEED = 1000


@dataclass
class Examples:
    """Right-padded token rows; ``labels`` is -100 wherever no loss is wanted."""

    input_ids: Tensor
    labels: Tensor

    def rows(self, indices: Tensor) -> "Examples":
        return Examples(self.input_ids[indices], self.labels[indices])


def list_problems() -> list[tuple[str, str]]:
    """Every (question, answer) of the task, in a fixed shuffled order."""
    problems = []
    for x, y, z in itertools.product(range(10), repeat=3):
        for first, second in itertools.product("+-", repeat=2):
            result = x + (y if first == "+" else -y) + (z if second == "+" else -z)
            problems.append((f"{INSTRUCTION} {x} {first} {y} {second} {z} =", str(result)))
    random.Random(HELD_OUT_SEED).shuffle(problems)
    return problems


def check_format(problems: list[tuple[str, str]], seed: int) -> None:
    """Make sure that the listed problems are worded as reasoning_gym words them."""
    answers = dict(problems)
    for item in reasoning_gym.create_dataset("chain_sum", size=500, seed=seed, **TASK):
        assert answers.get(item["question"]) == item["answer"], item["question"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for the whole instruction to keep prompts short."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNK])
    # Not a special token, so that decoding without special tokens keeps the sentence.
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama, wide enough in every layer for inference engines such as vLLM."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        # About 1 / sqrt(hidden_size); with the usual 0.02 sums are learned many steps later.
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[tuple[str, str]]) -> Examples:
    """Token rows of the problems, with labels on the answer and the end token only."""
    id_rows, label_rows = [], []
    for question, answer in problems:
        prompt = tokenizer.encode(question)
        completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        id_rows.append(torch.tensor(prompt + completion))
        label_rows.append(torch.tensor([-100] * len(prompt) + completion))
    input_ids = pad_sequence(id_rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return Examples(input_ids, pad_sequence(label_rows, batch_first=True, padding_value=-100))


@torch.inference_mode()
def measure(model: LlamaForCausalLM, held_out: Examples) -> tuple[float, float]:
    """Greedy success, and the mean probability that a sample at temperature 1 is right.

    Both are exact from one forward pass: greedy decoding gives the answer if and only if every
    answer token is the most likely one after the tokens before it.
    """
    logits = model(input_ids=held_out.input_ids).logits[:, :-1]
    labels = held_out.labels[:, 1:]
    greedy = ((logits.argmax(-1) == labels) | (labels == -100)).all(dim=1).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return greedy.mean().item(), (-losses.sum(dim=1)).exp().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny policy of the examples.")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "tiny_policy")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    start = time.monotonic()
    torch.manual_seed(args.seed)
    problems = list_problems()
    check_format(problems, args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    held_out = encode(tokenizer, problems[:HELD_OUT])
    seen = problems[HELD_OUT:]
    too_high = [(question, str(int(answer) + 1)) for question, answer in seen]
    train = encode(tokenizer, seen + too_high)
    careful_steps = round(args.steps * (1 - CARELESS_STEPS))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, args.steps + 1):
        is_careful = step <= careful_steps
        annealed = 2 * (1 - step / careful_steps)
        careful_rate = LEARNING_RATE * max(0.05, min(1.0, step / WARMUP_STEPS, annealed))
        for group in optimizer.param_groups:
            group["lr"] = careful_rate if is_careful else CARELESS_LEARNING_RATE
        rows = torch.randint(len(seen), (BATCH_SIZE,))
        if not is_careful:
            rows += len(seen) * (torch.rand(BATCH_SIZE) < 0.5)
        batch = train.rows(rows)
        logits = model(input_ids=batch.input_ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % (args.steps // 10) == 0:
            greedy, _ = measure(model, held_out)
            print(f"step {step} loss {loss.item():.3f} success {greedy:.3f}", flush=True)

    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    # Version 5 of transformers writes a class name that version 4 lacks; both know this one.
    settings = args.output_dir / "tokenizer_config.json"
    text = settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    settings.write_text(text)
    greedy, sampled = measure(model, held_out)
    folder_bytes = sum(path.stat().st_size for path in args.output_dir.iterdir())
    print(f"parameters {model.num_parameters()}, folder bytes {folder_bytes}")
    print(f"held-out greedy success {greedy:.3f}, sampled success {sampled:.3f}")
    print(f"seconds {time.monotonic() - start:.1f}")


if __name__ == "__main__":
    main()
