"""`Throughput`: logs how many tokens are sampled and trained, per second and per step."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs tokens per second and per step.

    Tokens of all processes are counted, and divided by the time of the slowest process:

    - `throughput/tokens_per_s`: tokens of prompts and completions, per second of the whole step.
    - `throughput/completion_tokens_per_s`: sampled tokens, per second of sampling
      (`time/rollout_s`); not logged where the module does not log that time.
    - `throughput/tokens_per_step`: tokens of prompts and completions in this step.
    - `throughput/total_completion_tokens`: tokens sampled since step 0, also before a resume.

    The module has `rollouts`, as `HasRollouts` in `rollout_logger` says. The time of a step
    includes what callbacks before this one in the list do after the batch.

    Raises:
        ValueError: the module has no `rollouts` when training starts.
    """

    def __init__(self) -> None:
        self.total_completion_tokens = 0
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(pl_module, "rollouts"):
            raise ValueError(
                f"Throughput needs {type(pl_module).__name__} to have `rollouts`, the "
                f"logra_lightning.types.Rollouts of the last batch, or None"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        step_s = time.perf_counter() - self._started
        rollout_s = float(trainer.callback_metrics.get("time/rollout_s", 0.0))
        module: Any = pl_module
        prompt_tokens = completion_tokens = 0
        if module.rollouts is not None:
            prompt_tokens = sum(map(len, module.rollouts.prompt_ids))
            trained = int(module.rollouts.lengths.sum())
            completion_tokens = int(module.rollouts.metrics.get("rollout/tokens", trained))
        # With times in microseconds all are whole numbers: exact, in one message to the others.
        local = torch.tensor(
            [prompt_tokens + completion_tokens, completion_tokens, _us(step_s), _us(rollout_s)],
            dtype=torch.int64,
            device=pl_module.device,
        )
        processes = torch.as_tensor(pl_module.all_gather(local)).view(-1, 4)
        tokens, completion_tokens = processes[:, :2].sum(dim=0).tolist()
        step_us, rollout_us = processes[:, 2:].amax(dim=0).tolist()
        self.total_completion_tokens += completion_tokens
        values = {
            "tokens_per_s": 1e6 * tokens / max(step_us, 1),
            "tokens_per_step": float(tokens),
            "total_completion_tokens": float(self.total_completion_tokens),
        }
        if rollout_us > 0:
            values["completion_tokens_per_s"] = 1e6 * completion_tokens / rollout_us
        pl_module.log_dict({f"throughput/{name}": value for name, value in values.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"total_completion_tokens": self.total_completion_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total_completion_tokens = state_dict["total_completion_tokens"]


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
