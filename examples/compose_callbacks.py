"""Gradient sketches in your own LightningModule: our strategy, optimizer and callback.

    python examples/compose_callbacks.py

A policy of one hidden layer plays a bandit with contexts; nothing here is a language model.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from logra_lightning import RelativeRowAdam, SketchAccumulation, SketchStrategy


class Bandit(LightningModule):
    """Chooses one of 10 arms; the right one is the largest of the 10 numbers it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # several backward passes make one step
        self.policy = nn.Sequential()
        self.policy.add_module("up_proj", nn.Linear(10, 64))
        self.policy.add_module("act", nn.Tanh())
        self.policy.add_module("down_proj", nn.Linear(64, 10))

    def training_step(self, contexts: Tensor, batch_idx: int) -> None:
        reward = 0.0
        for microbatch in contexts.chunk(4):
            distribution = torch.distributions.Categorical(logits=self.policy(microbatch))
            arms = distribution.sample()
            rewards = (arms == microbatch.argmax(dim=-1)).float()
            loss = -(distribution.log_prob(arms) * (rewards - 0.5)).sum() / len(contexts)
            self.manual_backward(loss)  # adds to the sketches; no gradient of a matrix exists
            reward += rewards.sum().item() / len(contexts)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("reward", reward, prog_bar=True)

    def configure_optimizers(self) -> RelativeRowAdam:
        sketches = self.trainer.strategy.sketches
        return RelativeRowAdam(self.parameters(), sketches, update_ratio=0.05)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(256 * 150, 10), batch_size=256)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        strategy=SketchStrategy(rank=8, targets=["up_proj", "down_proj"]),
        callbacks=[SketchAccumulation(refresh_every=1)],
        max_epochs=1,
        enable_checkpointing=False,
    )
    trainer.fit(Bandit())
    print(f"reward of the last step: {trainer.callback_metrics['reward']:.2f} (chance: 0.10)")
