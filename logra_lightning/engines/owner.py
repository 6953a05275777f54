"""`EngineOwner`: starts an engine once, refuses it when its weights are old, and closes it."""

from __future__ import annotations

import importlib.util

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from logra_lightning.engines.engine import Engine
from logra_lightning.engines.torch_engine import TorchEngine
from logra_lightning.engines.vllm_engine import VLLMEngine
from logra_lightning.policy.load import stop_token_ids


class EngineOwner:
    """The life of a module's engine.

    Args:
        engine: what samples; `default_engine()` when None.
    """

    def __init__(self, engine: Engine | None) -> None:
        self.engine: Engine = engine or default_engine()
        self._started = False

    def ready(self, policy: nn.Module, tokenizer: object) -> Engine:
        """The engine; the first call starts it with the policy as it stands then.

        Args:
            policy: the `transformers` model that is being trained.
            tokenizer: the policy's tokenizer, which names the end-of-sequence token.
        """
        if not self._started:
            self.engine.start(policy, stop_token_ids(policy, tokenizer))
            self._started = True
        return self.engine

    def expect(self, longest: int | None, precision: str) -> None:
        """Tell the engine what the run will ask for, if it wants to know.

        Args:
            longest: largest number of tokens of a prompt and its completion; None if not known.
            precision: the Trainer's.
        """
        expect = getattr(self.engine, "expect", None)
        if expect is not None:
            expect(longest=longest, dtype=torch.bfloat16 if precision == "bf16-mixed" else None)

    def check_version(self, steps: int) -> None:
        """Refuse to sample for training from weights that have been trained on since.

        Args:
            steps: optimizer steps completed so far.

        Raises:
            RuntimeError: the engine samples from an older policy.
        """
        if self.engine.policy_version not in (None, steps):
            raise RuntimeError(
                f"{type(self.engine).__name__} samples from policy version "
                f"{self.engine.policy_version}, but {steps} steps have been made: add the "
                f"WeightSync callback (logra_lightning.callbacks); on the command line, "
                f"weight_sync.enabled=true"
            )

    def close(self) -> None:
        """Free what the engine took; it starts again when it is next asked for."""
        self.engine.close()
        self._started = False


class CloseEngine(Callback):
    """Closes the engine of a run that failed: Lightning tears a module down only after a good end.

    Args:
        owner: owner of the engine to close.
    """

    def __init__(self, owner: EngineOwner) -> None:
        self._owner = owner

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._owner.close()


def default_engine() -> Engine:
    """`VLLMEngine` where vLLM is installed, else `TorchEngine`, which is said."""
    if importlib.util.find_spec("vllm") is not None:
        return VLLMEngine()
    rank_zero_info("vLLM is not installed: TorchEngine samples the completions.")
    return TorchEngine()
