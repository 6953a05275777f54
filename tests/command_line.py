"""The command line in this process, up to the made objects."""

from __future__ import annotations

import sys

import pytest

from logra_lightning.cli import LograCLI
from tests.conftest import ROOT


class Parsed(LograCLI):
    """Makes everything and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def parse(monkeypatch: pytest.MonkeyPatch, *args: str) -> Parsed:
    """What the command line makes of its arguments, at the root of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["logra_lightning", *args])
    return Parsed()
