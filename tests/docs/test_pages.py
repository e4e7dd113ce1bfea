"""The pages: links lead somewhere, commands exist, and Python examples run."""

import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cetane.bundle import Bundle
from cetane.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
HOME = "https://github.com/cetane/cetane/blob/main/"


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for link in links(page):
        target = link.partition("#")[0]
        if target.startswith(HOME):
            assert (ROOT / target.removeprefix(HOME)).is_file(), link
        elif target and not target.startswith("https://"):
            assert (page.parent / target).is_file(), link


def places(page: Path) -> set[str]:
    """The anchors of a page: its headings, as mkdocs and GitHub name them, and its own marks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    marks = re.findall(r'<a id="([^"]+)"', text)
    return {re.sub(r"[-\s]+", "-", heading) for heading in words} | set(marks)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.removeprefix(HOME).partition("#")
        if anchor and not target.startswith("https://"):
            assert anchor in places(page.parent / target if target else page), link


def test_pages_from_the_code_are_up_to_date() -> None:
    """`python scripts/docs_pages.py` writes them."""
    made = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"))["pages"]()
    for name, text in made.items():
        assert text == (DOCS / "reference" / name).read_text(encoding="utf-8"), name


def test_the_recipe_page_names_values() -> None:
    """A type is plain words and values, not a name of the code, and what a file may hold is a
    row."""
    page = (DOCS / "reference" / "recipe.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    types = {name.strip("`"): kind for name, kind, *_ in rows}
    for name, kind in types.items():
        rest = re.sub(r"`[a-z0-9]+(-[a-z]+)*`", "", kind, flags=re.IGNORECASE)
        assert re.fullmatch(r"[a-z ,]*0?", rest), (name, kind)
    assert types["sliding"].startswith("`readonly`, `blend`, ")
    assert types["quality"] == "`near-lossless`, `good` or `usable`"
    assert types["verify"] == "whole number, or 0"
    assert types["subset"] == types["scores"] == "path of a file"


def test_links_of_the_readme_are_absolute() -> None:
    """The page of the package has no files beside it."""
    assert all(link.startswith("https://") for link in links(ROOT / "README.md"))


def test_the_pages_and_the_package_name_the_same_pythons() -> None:
    """Elsewhere pip makes a coremltools without its compiled parts, and a port fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md"):
        assert "Python 3.11 to 3.13" in page.read_text()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Command lines of the pages that teach."""
    for page in (ROOT / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))):
        for block in re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("cetane "):
                    yield page.name, shlex.split(line, comments=True)[1:]


SHIPPED = sorted(path for end in ("md", "md.j2") for path in (ROOT / "src").rglob(f"*.{end}"))
"""Pages that lie beside bundles and exports, or their templates."""
TYPED = re.compile(r"(cetane|dask|make|pip|python|uv|\.venv\S+) ")


@pytest.mark.parametrize("page", [*WRITTEN, *SHIPPED], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shell_takes_the_commands_as_printed(page: Path) -> None:
    """zsh, the shell of a Mac, takes a comment for arguments, and a list in brackets for a pattern
    of files."""
    text = page.read_text(encoding="utf-8")
    fenced = "".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    indented = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for line in [*fenced.splitlines(), *indented]:
        if TYPED.match(line):
            bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
            assert " #" not in bare and "=[" not in bare, line


def test_a_shell_takes_what_errors_advise() -> None:
    for module in (ROOT / "src" / "cetane").rglob("*.py"):
        advice = re.search(r"--set [\w.]+=\[", module.read_text(encoding="utf-8"))
        assert advice is None, (module, advice)


def test_the_commands_of_the_pages_exist_and_take_their_options() -> None:
    seen = 0
    for page, (name, *arguments) in commands():
        if name.startswith("-"):
            continue
        top: Any = typer.main.get_command(app)
        context = top.make_context("cetane", [], resilient_parsing=True)
        command = top.get_command(context, name)
        if hasattr(command, "commands"):
            name, *arguments = arguments
            command = command.commands.get(name)
        assert command is not None, (page, name)
        command.make_context(name, list(arguments), resilient_parsing=True)
        seen += 1
    assert seen > 30


def test_the_readmes_example_runs(
    tiny_bundle: Callable[..., Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shutil.copytree(tiny_bundle().path, tmp_path / "my-bundle")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
