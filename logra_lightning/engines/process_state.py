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


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the global random states of Python, numpy and torch back at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undo what starting vLLM does to random states, threads, environment and warnings."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    try:
        with random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
        torch.set_num_threads(threads)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


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
