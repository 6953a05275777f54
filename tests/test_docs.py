"""The README and the pages of docs/ say what is there: commands, YAML, links, paths, names."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path

import lightning.pytorch
import pytest
import yaml

import logra_lightning
from logra_lightning import objective, rewards
from logra_lightning.cli import main
from logra_lightning.policy.export import export_checkpoint
from logra_lightning.policy.hf_folder import Written
from logra_lightning.renamed import CLASSES as OLD_CLASSES
from logra_lightning.renamed import OPTIONS as OLD_OPTIONS
from tests.command_line import parse
from tests.conftest import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
}
README = PAGES["README.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Page and text of each fenced block in a language."""
    for page, text in PAGES.items():
        for found, block in FENCE.findall(text):
            if found == language:
                yield page, block


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", PAGES[page])


def code_spans() -> Iterator[tuple[str, str]]:
    """Page and text of each span in backticks."""
    for page in PAGES:
        for span in INLINE.findall(prose(page)):
            yield page, span.replace("\\|", "|")


def command_lines() -> Iterator[str]:
    """What a reader may paste into a shell: lines of bash blocks, and commands in backticks."""
    for _, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.partition(" #")[0].strip()
    for _, span in code_spans():
        if re.match(r"(python|pytest|make|bash) ", span):
            yield span


LINES = list(dict.fromkeys(command_lines()))
COMMANDS = [line.split(maxsplit=3)[3] for line in LINES if line.startswith("python -m logra_l")]
SCRIPTS = [line for line in LINES if re.match(r"python \w+/", line)]
YAML = list(blocks("yaml"))
LINKS = [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)\s]+)\)", INLINE.sub("", prose(page)))
    if not target.startswith("https://")
]
FOLDERS = "tests|docs|examples|benchmarks|configs|callbacks|logra_lightning|\\.ci"
PATHS = sorted(
    {
        found
        for text in PAGES.values()
        for found in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*\w)(?:::(\w+))?", text)
    }
)
GROUPS = "model|kl_budget|weight_sync|engine_check|sketch_accumulation|trainer"
OPTIONS = sorted(
    {
        option
        for page, span in code_spans()
        if page != "docs/renamed.md"
        for option in re.findall(rf"^((?:{GROUPS})\.[\w.]+)", span)
    }
)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 200


def test_the_checks_below_have_something_to_check() -> None:
    assert len(COMMANDS) >= 9
    assert len(SCRIPTS) >= 6
    assert len(YAML) >= 8
    assert len(LINKS) >= 40
    assert len(PATHS) >= 40
    assert len(OPTIONS) >= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = shlex.split(command)
    if args[0] == "export":

        @wraps(export_checkpoint)
        def parsed(**_: object) -> Written:
            return Written(Path("hf"), 0, "float32")

        monkeypatch.setattr("logra_lightning.cli.export_checkpoint", parsed)
        monkeypatch.setattr(sys, "argv", ["logra_lightning", *args])
        main()
    elif {"--help", "--print_config"} & set(args):
        with pytest.raises(SystemExit) as stop:
            parse(monkeypatch, *args)
        assert stop.value.code == 0
    else:
        parse(monkeypatch, *args)


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_script_knows_its_options(command: str) -> None:
    _, script, *args = shlex.split(command)
    source = (ROOT / script).read_text()
    for option in [arg for arg in args if arg.startswith("--")]:
        assert f'"{option}"' in source, option


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [line.split()[1] for line in LINES if line.startswith("make ")]
    assert len(targets) >= 5
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(("page", "block"), YAML, ids=[page for page, _ in YAML])
def test_every_yaml_block_goes_over_the_quick_start(
    page: str, block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "block.yaml"
    path.write_text(block)
    config = parse(
        monkeypatch, "fit", "--config=configs/quickstart.yaml", f"--config={path}"
    ).config["fit"]
    for key, options in yaml.safe_load(block).items():
        assert key in config
        for option in options:
            assert f"{key}.{option}" in config


def test_every_option_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(monkeypatch, "fit", "--config=configs/quickstart.yaml").config["fit"]
    options = [re.split(r"\.(?:init_args|class_path)", option)[0] for option in OPTIONS]
    assert [option for option in options if option not in config] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_every_link_leads_somewhere(page: str, target: str) -> None:
    file, _, anchor = target.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    assert path.exists()
    if anchor:
        assert anchor in anchors(path)


@pytest.mark.parametrize(("path", "test"), PATHS)
def test_every_path_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    if test:
        assert f"def {test}(" in (ROOT / path).read_text()


def test_the_readme_leads_to_every_page_and_draws_every_room() -> None:
    linked = {target.partition("#")[0] for page, target in LINKS if page == "README.md"}
    assert {page for page in PAGES if page.startswith("docs/")} <= linked
    tree = README.split("## Layout")[1].split("```")[1]
    drawn = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "logra_lightning").glob("*/*.py")}
    assert drawn == rooms
    for file in re.findall(r"\w+\.py", tree):
        assert (ROOT / "logra_lightning" / file).is_file(), file


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two first rows."""
    section = re.split(rf"^#+ {heading}$", PAGES[page], flags=re.MULTILINE)[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in r.strip("|").split("|")] for r in rows[0].splitlines()[2:]]


@pytest.mark.parametrize("kind", ["Advantage", "Loss", "Normalizer", "Correction", "ReferenceKL"])
def test_every_class_of_the_objective_is_named(kind: str) -> None:
    option, named = "", set()
    for first, path, *_ in table("docs/objective.md", "Choices"):
        option = first.strip("`").removeprefix("model.objective.") or option
        if option.replace("_", "") == kind.lower():
            named |= set(re.findall(r"`objective\.(\w+)`", path))
    base = getattr(objective, kind)
    public = {name: getattr(objective, name) for name in objective.__all__}
    classes = {n for n, c in public.items() if isinstance(c, type) and issubclass(c, base)}
    assert named == classes - {kind}
    assert named


def test_every_reward_is_named() -> None:
    named = {
        path.strip("`").removeprefix("rewards.")
        for path, _ in table("docs/objective.md", "Rewards")
    }
    public = {name: getattr(rewards, name) for name in rewards.__all__}
    classes = {n for n, c in public.items() if isinstance(c, type) and "__call__" in vars(c)}
    assert named == classes | {"exact_match"}


def test_every_class_path_can_be_imported() -> None:
    rooms = "objective|rewards|data|engines|optim|strategy|callbacks|kl|types"
    pages = "\n".join(text for page, text in PAGES.items() if page != "docs/renamed.md")
    paths = set(re.findall(rf"(?<!pytorch\.)\b({rooms})\.([A-Z]\w+)", pages))
    assert len(paths) >= 30
    for room, name in paths:
        assert hasattr(importlib.import_module(f"logra_lightning.{room}"), name), f"{room}.{name}"


def test_python_blocks_name_what_is_there() -> None:
    trees = {page: ast.parse(block) for page, block in blocks("python")}
    assert len(trees) >= 3
    names = {n.id for n in ast.walk(trees["README.md"]) if isinstance(n, ast.Name)}
    classes = {name for name in names if name[0].isupper()} - {"Mine"}
    assert len(classes) >= 6
    for name in classes:
        assert hasattr(logra_lightning, name) or hasattr(lightning.pytorch, name), name


def test_the_reward_that_is_shown_is_the_one_of_the_example() -> None:
    example = ast.parse((ROOT / "examples" / "larger_number.py").read_text())
    page = next(block for name, block in blocks("python") if name == "docs/objective.md")
    functions = [
        next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        for tree in (ast.parse(page), example)
    ]
    for function in functions:
        del function.body[0]  # the docstring
    assert ast.dump(functions[0]) == ast.dump(functions[1])


def test_the_renamed_are_those_that_the_command_line_tells() -> None:
    rows = {old.strip("`"): new.strip("`") for old, new in table("docs/renamed.md", "Renamed.*")}
    told = OLD_OPTIONS | {
        f"logra_lightning.{old}": f"logra_lightning.{new}" for old, new in OLD_CLASSES.items()
    }
    assert {old: new for old, new in rows.items() if "`" not in old} == told


def test_the_method_has_nine_rows_and_nobody_refers_to_another() -> None:
    rows = [row[0] for row in table("docs/method.md", "The nine rows")]
    assert rows == [str(number) for number in range(1, 10)]
    headings = re.findall(r"^### (\d) ", PAGES["docs/method.md"], re.MULTILINE)
    assert headings == rows
    for folder in ("logra_lightning", "callbacks", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s+", " ", path.read_text().replace("#", " "))
            for numbers in re.findall(r"[Rr]ows? ([\d, and]+?) of docs/method\.md", text):
                assert set(re.findall(r"\d+", numbers)) <= set(rows), path
