"""A folder that another runtime loads, and whether it is right."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export import anemll, coreml_llm
from cetane.files import Progress, check_files, is_present, read_json, records
from cetane.gates.anemll import judge_anemll
from cetane.gates.coreml_llm import judge_coreml_llm
from cetane.gates.verdict import Check
from cetane.schema.manifest import CONFIGS, ORIGIN, Origin, Runtime
from cetane.schema.recipe import Recipe
from cetane.validation import validated


class RuntimeModule(Protocol):
    """A package of `cetane.export` for a runtime whose packages are lowered once more."""

    APP: str
    COMPILE: str
    FILES: tuple[str, ...]
    """All files that its folder may hold beside its packages and `cetane.json`."""

    def export(
        self, recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress, /
    ) -> None: ...
    def packages(
        self, recipe: Recipe, checkpoint: Checkpoint, /
    ) -> Mapping[str, Callable[[Path], None]]: ...
    def check(self, folder: Path, /) -> Sequence[str]: ...


RUNTIMES: dict[Runtime, RuntimeModule] = {"anemll": anemll, "coreml-llm": coreml_llm}
Judge = Callable[[Bundle, Checkpoint, Path, Progress], tuple[Sequence[Check], Sequence[str]]]
JUDGES: dict[Runtime, Judge] = {"anemll": judge_anemll, "coreml-llm": judge_coreml_llm}
"""The gates that play a folder, and compare it with the bundle."""


@dataclass(frozen=True)
class RuntimeFolder:
    """A folder that another runtime loads."""

    path: Path
    runtime: RuntimeModule
    problems: Sequence[str]
    """The parts of the runtime's contract that the folder breaks, and files that have changed."""
    checks: Sequence[Check] = ()
    """The comparison of its logits with the bundle's, if it was played."""
    unjudged: Sequence[str] = ("logits: nothing ran its packages",)
    """What no comparison has reached, in words."""

    @property
    def app(self) -> str:
        """The runtime's name."""
        return self.runtime.APP

    @property
    def compile(self) -> str:
        """The command that compiles its packages, on a Mac."""
        return self.runtime.COMPILE

    @property
    def passed(self) -> bool:
        return not self.problems and all(check.passed for check in self.checks)

    @property
    def packages(self) -> list[str]:
        """The names of its packages: a check reads their programs."""
        return sorted(path.stem for path in self.path.glob("*.mlpackage"))

    @property
    def compiled(self) -> list[str]:
        """The names of packages that are there compiled only: nothing in them can be checked."""
        compiled = {path.stem for path in self.path.glob("*.mlmodelc")}
        return sorted(compiled.difference(self.packages))

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.path), "passed": self.passed, "packages": self.packages,
            "compiled": self.compiled, "compile": self.compile, "problems": list(self.problems),
            "checks": [check.model_dump(mode="json") for check in self.checks],
            "unjudged": list(self.unjudged),
        }  # fmt: skip


def check_folder(folder: str | Path) -> RuntimeFolder:
    """Check a folder that an app loads, of the runtime whose config lies in it.

    If it names its bundle, its files must be those that were compared with it. CetaneError if no
    runtime's config is there.
    """
    path = Path(folder)
    for name, runtime in CONFIGS.items():
        if (path / name).is_file():
            module = RUNTIMES[runtime]
            made = RuntimeFolder(path, module, module.check(path))
            changed = changed_files(path, made.compiled)
            return replace(made, problems=[*made.problems, *changed])
    raise CetaneError(
        f"{path} has none of {', '.join(CONFIGS)}", "cetane export --layout writes such a folder"
    )


def origin_of(folder: Path) -> Origin | None:
    """What a folder tells of its bundle; None if it tells nothing. CetaneError for a damaged file,
    and for one of an older cetane, which lists no files."""
    path = folder / ORIGIN
    if not is_present(path):
        return None
    content = read_json(path, follow=False, unique=True)
    if "files" not in content:
        raise CetaneError(f"{path} lists no files, as older cetanes wrote it: export again")
    return validated(Origin, content, str(path))


def is_judged(folder: Path, package: str, bundle: Bundle) -> bool:
    """Whether a folder was compared with this bundle, with the package that is there now."""
    try:
        origin = origin_of(folder)
    except CetaneError:
        return False
    if origin is None or origin.bundle != bundle.digest:
        return False
    own = {file: record for file, record in origin.files.items() if package_of(file) == package}
    return records(folder, folder / f"{package}.mlpackage") == own


def changed_files(folder: Path, apart: Collection[str]) -> list[str]:
    """Why a folder is not as it was when it was compared with its bundle, if it names one. Packages
    `apart` are left out, such as compiled ones: nobody can tell what is in them."""
    try:
        origin = origin_of(folder)
        if origin is None:
            return []
        listed = {package_of(name) for name in origin.files}
        added = [path.name for path in folder.glob("*.ml*") if path.stem not in listed]
        if added:
            return [f"{folder}: {min(added)} is not in {ORIGIN}"]
        there = {
            name: record
            for name, record in origin.files.items()
            if package_of(name) not in apart
        }  # fmt: skip
        check_files(folder, there, "")
    except CetaneError as error:
        return [error.message]
    return []


def package_of(file: str) -> str:
    """The name of the package that a file of a folder is in; empty if it is in none."""
    first, _, rest = file.partition("/")
    return first.removesuffix(".mlpackage") if rest and first.endswith(".mlpackage") else ""
