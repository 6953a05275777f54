"""What would be left half done is finished before a signal ends the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from transformers import LlamaForCausalLM

from logra_lightning.callbacks import Preemption
from logra_lightning.callbacks.preemption import PreemptedError
from logra_lightning.checkpoints.interruption import may_interrupt, uninterrupted
from logra_lightning.policy.reference import Reference

TRAINER: Any = SimpleNamespace(received_sigterm=False, world_size=1, global_rank=0)


@pytest.fixture
def in_a_batch() -> Iterator[Preemption]:
    """The callback in the middle of a batch."""
    callback, module = Preemption(), LightningModule()
    callback.on_train_start(TRAINER, module)
    callback.on_train_batch_start(TRAINER, module, None, 0)
    yield callback
    callback.on_train_end(TRAINER, module)


def test_a_signal_ends_the_batch_at_once(in_a_batch: Preemption) -> None:
    with pytest.raises(PreemptedError) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    os.kill(os.getpid(), signal.SIGTERM)  # a second one, sent with the first, changes nothing


def test_a_signal_waits_until_the_policy_is_back(
    in_a_batch: Preemption, llama: LlamaForCausalLM
) -> None:
    reference = Reference(llama)
    with torch.no_grad():
        for param in llama.parameters():
            param += 1
    trained = {name: value.clone() for name, value in llama.state_dict().items()}
    with reference.weights(), uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not may_interrupt()
    assert may_interrupt()
    with pytest.raises(PreemptedError):
        in_a_batch.on_before_backward()
    for name, value in llama.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_another_signal_seconds_later_ends_the_process_on_the_spot(
    in_a_batch: Preemption, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    with uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        later = time.monotonic() + 3
        monkeypatch.setattr(time, "monotonic", lambda: later)
        signal.raise_signal(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
