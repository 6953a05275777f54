"""What a release needs: one version, and a section of the changelog for it."""

from __future__ import annotations

import re
import tomllib

import logra_lightning
from tests.conftest import ROOT


def test_the_version_is_the_same_everywhere_and_the_changelog_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    assert logra_lightning.__version__ == version
    headings = re.findall(r"^## \[(.*?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == "Unreleased"
    name, date = headings[1]
    assert name == version
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
