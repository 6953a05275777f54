"""A `SyncedEngine` without vLLM: a copy of the policy, updated by the receiver of our workers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from logra_lightning.engines import PolicyWeight, TorchEngine
from logra_lightning.engines.vllm_worker import WeightReceiver
from logra_lightning.engines.weights import checksum
from logra_lightning.sketch import Factors


class CopyEngine(TorchEngine):
    """Samples from its copy, and records the calls it gets.

    Attributes:
        calls: names of the calls, in order.
        updates: the factors of each `merge`.
        loaded: the names of the weights of each `load`.
    """

    def __init__(self, sleep: Literal["none", "kv", "weights"] = "none") -> None:
        super().__init__()
        self.sleep_mode: Literal["none", "kv", "weights"] = sleep
        self.calls: list[str] = []
        self.updates: list[list[Factors]] = []
        self.loaded: list[list[str]] = []

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        self.copy = copy.deepcopy(policy)
        super().start(self.copy, stop_token_ids)
        self.receiver = WeightReceiver(self.copy)
        self.policy_version = 0

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        weights = list(weights)
        self.receiver.load(weights)
        self.calls.append("load")
        self.loaded.append([weight.name for weight in weights])
        self.policy_version = version

    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        assert self.receiver.merge(updates, list(others)) is None
        self.calls.append("merge")
        self.updates.append(list(updates))
        self.policy_version = updates[-1].version + 1

    def share(self, policy: nn.Module) -> None:
        for mine, theirs in zip(self.copy.parameters(), policy.parameters(), strict=True):
            theirs.data = mine.data
        self.calls.append("share")

    def refresh(self, *, version: int) -> None:
        self.calls.append("refresh")
        self.policy_version = version

    def sleep(self) -> None:
        self.calls.append("sleep")

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        held = {name: value for name, _, _, value in self.receiver.checksums()}
        found = {w.name: checksum(w.tensor, w.residual) for w in weights}
        return [name for name, value in found.items() if held[name] != value]


def disturb(engine: CopyEngine, name: str) -> None:
    """Change one element of a weight of the engine's copy."""
    with torch.no_grad():
        engine.copy.get_parameter(name).view(-1)[3].mul_(1.0078125)
