"""docs/architecture.md is true: its rooms are those that the linter keeps apart, and exist."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def rooms() -> list[str]:
    """The rooms of the table, from the bottom to the top of the imports."""
    return [name for first, *_ in rows("Rooms") for name in re.findall(r"`(\w+)(?:/|\.py)`", first)]


def layers() -> list[str]:
    """The rooms of the import contract, in the same order."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in content["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    names = [layer.split(" | ") for layer in reversed(contract["layers"])]
    return [name.removeprefix("cetane.") for layer in names for name in layer]


def test_the_rooms_of_the_page_are_those_of_the_contract() -> None:
    assert rooms() == layers()


def test_every_part_of_the_package_is_a_room() -> None:
    package = ROOT / "src" / "cetane"
    parts = {p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(rooms())


LARGE = ["checkpoint", "families", "planner", "engine", "gates", "fitting", "pipeline"]


@pytest.mark.parametrize("room", LARGE)
def test_the_table_of_a_large_room_names_every_file(room: str) -> None:
    """But for architectures: each is a file of `families/`."""
    table = section("Inside the large rooms").split(f"| `{room}/` | holds |\n")[1].split("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()]
    named = {name for first in firsts for name in re.findall(r"`(\w+\.py)`", first)}
    files = {
        path.name
        for path in (ROOT / "src" / "cetane" / room).glob("[!_]*.py")
        if "\nMODEL_TYPES = " not in path.read_text(encoding="utf-8")
    }
    assert named == files


def words() -> list[str]:
    return [word.strip() for first, *_ in rows("Words") for word in first.split(",")]


def types(module: Path) -> Iterator[str]:
    """The classes and named types of a module, without variables of types and without arrays."""
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        match statement:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not (
                isinstance(value, ast.Call) or ast.unparse(value).startswith("npt.NDArray")
            ):
                yield name


def test_a_word_has_one_meaning() -> None:
    assert len(words()) == len(set(words()))
    for word in ("head", "draft head", "attention head", "figure", "graph", "check", "program",
                 "lowering"):  # fmt: skip
        assert word in words()


def test_a_word_names_one_type() -> None:
    """But for options of commands, which are named as what they ask for."""
    package = ROOT / "src" / "cetane"
    modules = defaultdict(list)
    for module in package.rglob("*.py"):
        for name in types(module):
            modules[name].append(module.relative_to(package).as_posix())
    names = {"".join(part.capitalize() for part in word.split()) for word in words()}
    twice = {
        name: made
        for name in sorted(names & modules.keys())
        if len(made := [path for path in modules[name] if not path.startswith("cli/")]) > 1
    }
    assert not twice
