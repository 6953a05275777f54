"""Keeps the state of the trainer's process as it was, whatever a library does to it."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from logra_lightning.sketch.precision import matmul_precision_kept


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the global random states of Python, numpy and torch back at the end.

    Of several GPUs only the current one has its state kept: a process uses one.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undo what starting vLLM does to the process.

    That is: random states, threads, the environment, warnings, and the precision of fp32 matrix
    products, which vLLM's workers set.
    """
    environment, threads = dict(os.environ), torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    try:
        with random_state_kept(), matmul_precision_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
        torch.set_num_threads(threads)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Switch autocast off and let torch's default dtype be float32, as vLLM expects it.

    Lightning trains with both: under its autocast an engine in float32 would multiply in bfloat16.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def default_group_kept(keep: bool) -> Iterator[None]:
    """Keep vLLM's shutdown from destroying the default process group.

    Args:
        keep: true where the trainer made that group; false lets everything be destroyed.
    """
    destroy = torch.distributed.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            destroy(group)

    if keep:
        torch.distributed.destroy_process_group = destroy_others
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy
