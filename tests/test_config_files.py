"""Files of settings: which key stands where, and which stands twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from logra_lightning.config_files import doubled_key, places_of

TEXT = """\
model:
  sampling: &sampling {max_tokens: 6, temprature: 1}
  rewards:
    - {function: f, weight: 2e-4}
    - function: g
      wieght: 1
  evaluation:
    sampling: *sampling
data: data.yaml
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/my.yaml").write_text(TEXT)
    Path("configs/data.yaml").write_text("init_args: {weight: 1, sise: 3}\n")
    return "configs/my.yaml"


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"], ["-c", "{}"]])
def test_a_key_is_found_by_its_path_or_by_its_last_part(config: str, form: list[str]) -> None:
    words = ["fit", *(part.format(config) for part in form)]
    for name in ("temprature", "model.sampling.temprature"):
        assert list(map(str, places_of(words, name))) == [
            f"{config}, line 2: model.sampling.temprature"
        ]
    (found,) = places_of(words, "wieght")
    assert (found.path, found.line) == ("model.rewards[1].wieght", 6)
    assert places_of(words, "nowhere") == []


def test_a_file_that_a_file_names_is_read_too(config: str) -> None:
    for name in ("sise", "data.init_args.sise"):
        (found,) = places_of(["--config", config], name)
        assert str(found) == "configs/data.yaml, line 1: init_args.sise"


def test_of_several_places_those_count_that_have_the_same_neighbours(config: str) -> None:
    words = ["--config", config]
    paths = ["model.rewards[0].weight", "init_args.weight"]
    assert [key.path for key in places_of(words, "weight")] == paths
    assert [key.path for key in places_of(words, "weight", {"function"})] == paths[:1]
    assert [key.path for key in places_of(words, "weight", {"other"})] == paths


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: {b: 1, c: 2, b: 3}", "line 1: a.b stands there twice, first in line 1"),
        (
            "a:\n  - b: 1\n    c: 2\n    b: 1\n",
            "line 4: a[0].b stands there twice, first in line 2",
        ),
        ("a: 1\nb: {a: 1}\nc: [{a: 1}, {a: 1}]\n", ""),
        ("x: &x {a: 1}\ny: &y {b: 1}\nz: {<<: *x, a: 2}\nw: {<<: *x, <<: *y}\nv: *x\n", ""),
        ('{"a": 1, "a": 2}', "line 1: a stands there twice"),
        ("a: [", ""),  # the parser tells
        ("", ""),
    ],
)
def test_a_doubled_key_is_named_with_both_of_its_lines(
    tmp_path: Path, text: str, found: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    message = doubled_key(["fit", f"--config={path}"])
    assert (f"{path}, {found}" in message) if found else message == ""
    assert doubled_key(["fit", "--config", str(path), "--config", str(path)]) == message
    assert doubled_key(["fit", "--config", str(tmp_path / "nowhere.yaml")]) == ""
