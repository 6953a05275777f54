"""The callbacks, the strategy and a vLLM engine in your own LightningModule, with your own loss.

    python examples/compose_callbacks.py

Nothing of `PolicyModule`: what the callbacks need of a module is `policy`, `ready_engine()` and
`kl_probe()`. `--engine torch` runs where vLLM is not installed.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from logra_lightning import (
    KLBudget,
    RelativeRowAdam,
    SamplingParams,
    SketchAccumulation,
    SketchStrategy,
    TorchEngine,
    VLLMEngine,
    WeightSync,
)
from logra_lightning.engines import Engine
from logra_lightning.kl import KLProbe
from logra_lightning.policy.load import freeze_, load_policy, plain_layers
from logra_lightning.tokenizer import load_tokenizer

MODEL = str(Path(__file__).parent / "tiny_policy")
GROUP, MICROBATCHES = 8, 4


class Reinforce(LightningModule):
    """Plain policy gradient with the mean reward as its baseline, on sums of three digits."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.automatic_optimization = False  # several backward passes make one step
        self.engine, self.engine_started = engine, False
        self.tokenizer, self.policy = load_tokenizer(MODEL), load_policy(MODEL)
        freeze_(self.policy, None, train_others=False)

    def training_step(self, sums: list[tuple[int, int, int]], batch_idx: int) -> None:
        questions = [f"arithmetic problem: {x} + {y} - {z} =" for x, y, z in sums]
        text = "State the final answer to the following {}"
        prompts = [self.tokenizer(text.format(q))["input_ids"] for q in questions]
        groups = self.ready_engine().generate(
            prompts, SamplingParams(6), num_completions=GROUP, seed=self.global_step
        )
        rollouts = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        answers = self.tokenizer.batch_decode(
            [c.token_ids for _, c in rollouts], skip_special_tokens=True
        )
        right = [str(x + y - z) for x, y, z in sums for _ in range(GROUP)]
        pairs = zip(answers, right, strict=True)
        rewards = torch.tensor([float(answer.strip() == good) for answer, good in pairs])
        advantages = rewards - rewards.mean()

        width = max(len(p) + len(c.token_ids) for p, c in rollouts)
        self.tokens = torch.zeros(len(rollouts), width, dtype=torch.int64)
        self.predicts = torch.zeros(len(rollouts), width - 1, dtype=torch.bool)
        for row, (p, c) in enumerate(rollouts):
            end = len(p) + len(c.token_ids)
            self.tokens[row, :end] = torch.tensor([*p, *c.token_ids])
            self.predicts[row, len(p) - 1 : end - 1] = True

        for rows in torch.arange(len(rollouts)).chunk(MICROBATCHES):
            logprobs = torch.log_softmax(self.logits(self.hidden(rows)), dim=-1)
            drawn = self.tokens[rows, 1:][self.predicts[rows]]
            each = advantages[rows].repeat_interleave(self.predicts[rows].sum(dim=1))
            loss = -(each * logprobs.gather(-1, drawn[:, None])[:, 0]).sum() / self.predicts.sum()
            self.manual_backward(loss)  # adds to the sketches; no gradient of a matrix exists
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("reward", rewards.mean(), prog_bar=True)

    def hidden(self, rows: Tensor) -> Tensor:
        states = self.policy.base_model(input_ids=self.tokens[rows]).last_hidden_state
        return states[:, :-1][self.predicts[rows]]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.policy.lm_head(hidden).float()

    def kl_probe(self, num_rollouts: int, max_tokens: int) -> KLProbe:
        """For KLBudget: where it takes the KL of a step."""
        rows = torch.arange(0, len(self.tokens), max(1, len(self.tokens) // num_rollouts))
        prepared = partial(plain_layers, self.policy)
        return KLProbe(self.policy, [partial(self.hidden, rows)], self.logits, prepared)

    def ready_engine(self) -> Engine:
        """For WeightSync: the engine, started."""
        if not self.engine_started:
            self.engine.start(self.policy, [self.tokenizer.eos_token_id])
            self.engine_started = True
        return self.engine

    def configure_optimizers(self) -> RelativeRowAdam:
        return RelativeRowAdam(self.parameters(), self.trainer.strategy.sketches)

    def train_dataloader(self) -> DataLoader:
        sums = torch.randint(0, 10, (32 * 60, 3)).tolist()
        return DataLoader(sums, batch_size=32, collate_fn=list)

    def teardown(self, stage: str) -> None:
        self.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "torch"], default="vllm")
    seed_everything(0)
    torch_engine = parser.parse_args().engine == "torch"
    engine = TorchEngine() if torch_engine else VLLMEngine(kv_cache_memory_bytes=1 << 26)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=SketchStrategy(rank=64),
        callbacks=[
            SketchAccumulation(refresh_every=1),
            KLBudget(start=0.02, end=0.01, steps=60, max_scale=1000),
            WeightSync(mode="factors", verify_every=20),
        ],
        max_epochs=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(Reinforce(engine))
    print(f"reward of the last step: {trainer.callback_metrics['reward']:.2f}")
