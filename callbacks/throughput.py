"""`Throughput`: tokens per step and per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Counts the tokens of each step over all ranks, against the time of the slowest one.

    The module has `rollouts`, as `logra_lightning.callbacks.rollout_logger.HasRollouts` says, and
    logs `time/rollout_s`, the seconds in which it sampled them.

    Logs `throughput/tokens_per_s` (tokens of prompts and completions that were trained, per second
    of the whole step), `throughput/completion_tokens_per_s` (sampled tokens per second of
    `time/rollout_s`; left out where the module does not log that), `throughput/tokens_per_step`,
    and `throughput/total_completion_tokens` (since the first step, also through a resume). A step
    lasts until this callback's turn: what other callbacks do after the batch counts if they come
    before it in the list.

    Raises:
        ValueError: when training starts, a module without `rollouts`.
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
        # All whole numbers, times as microseconds: exact, and one message between the ranks.
        local = torch.tensor(
            [prompt_tokens + completion_tokens, completion_tokens, _us(step_s), _us(rollout_s)],
            dtype=torch.int64,
            device=pl_module.device,
        )
        ranks = torch.as_tensor(pl_module.all_gather(local)).view(-1, 4)
        tokens, completion_tokens = ranks[:, :2].sum(dim=0).tolist()
        step_us, rollout_us = ranks[:, 2:].amax(dim=0).tolist()
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
