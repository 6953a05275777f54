"""All parts of a model are loaded from one place, and what cannot be loaded is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from logra_lightning.hub import checked_path, hub_options, one_line_errors
from tests.conftest import TINY_POLICY


def test_options_of_the_model_alone_are_left_out() -> None:
    given = {"revision": "v2", "attn_implementation": "eager", "token": "t", "rope_theta": 1.0}
    assert hub_options(given) == {"revision": "v2", "token": "t"}
    assert hub_options(None) == {}


def test_a_hub_name_stays_and_a_home_folder_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert checked_path("~/models/tiny") == str(tmp_path / "models" / "tiny")
    assert checked_path("gpt2") == "gpt2"
    assert checked_path("owner/model") == "owner/model"
    assert checked_path(str(TINY_POLICY)) == str(TINY_POLICY)


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere", "/nowhere/model", "a/b/c"])
def test_a_folder_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"there is no model folder '{path}': set model.model"):
        checked_path(path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("We couldn't connect to 'https://hub' to load\nthe files."), "cannot be reached"),
        (ValueError("pass the argument `trust_remote_code=True` to"), "{trust_remote_code: true}"),
        (ImportError("Using X needs Y. Run pip install Y."), "Using X needs Y: check model.model"),
        (KeyError("zamba9"), "zamba9"),
    ],
)
def test_errors_of_libraries_become_one_line(error: Exception, told: str) -> None:
    said = pytest.raises(ValueError, match="the model 'a/b' cannot be loaded")
    with said as found, one_line_errors("a/b"):
        raise error
    assert told in str(found.value)
    assert "\n" not in str(found.value)
