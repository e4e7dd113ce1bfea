"""One package of an exported folder made anew. The folder keeps a good one, even after a kill."""

from collections.abc import Sequence
from pathlib import Path

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import Progress, claimed, disk_errors, remove, silent
from cetane.pipeline.export import own_checkpoint
from cetane.pipeline.runtime_folder import (
    RUNTIMES,
    RuntimeFolder,
    RuntimeModule,
    changed_files,
    is_judged,
)
from cetane.schema.manifest import ORIGIN, Runtime


def replace_package(
    source: str | Path,
    output: str | Path,
    runtime: Runtime,
    package: str,
    *,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    progress: Progress = silent,
) -> RuntimeFolder:
    """Make one package of an exported folder anew, from a bundle, and check the folder.

    If the folder then breaks the runtime's contract, the old package comes back. The problems also
    name another file that is not as it was when the folder was compared with its bundle. `model`
    and `lora` are as in `export_runtime`. CetaneError if there is no such folder or package.
    """
    bundle, module = Bundle(Path(source)), RUNTIMES[runtime]
    folder = Path(output).resolve()  # "." has no name for the files beside it
    if not folder.is_dir():
        raise CetaneError(f"{folder}: no such folder", "leave out --package to write a whole one")
    makers = module.packages(bundle.plan.recipe, own_checkpoint(bundle, model, lora))
    if package not in makers:
        raise CetaneError(f"no package {package!r}", f"there are {', '.join(makers)}")
    fresh = folder.with_name(f".{folder.name}.fresh")
    with claimed(folder, f"replacing {package}"), disk_errors(folder):
        for name in makers:  # an earlier process may have been killed during its check
            restore(folder, name)
        remove(fresh)
        progress(package, 0, 1)
        try:
            makers[package](fresh)
            problems = swapped(folder, package, fresh, module)
            if not problems:
                unread = RuntimeFolder(folder, module, ()).compiled
                problems = changed_files(folder, {*unread, package})
            if not problems and not is_judged(folder, package, bundle):
                remove(folder / ORIGIN)  # nothing has compared the fresh one with the bundle
        finally:
            remove(fresh)
        progress("done", 1, 1)
    return RuntimeFolder(Path(output), module, problems)


def swapped(folder: Path, package: str, fresh: Path, module: RuntimeModule) -> Sequence[str]:
    """The problems of a folder with a fresh package; if there are any, the old one is back. If that
    is compiled, the fresh one only lay beside it.

    Without problems, the old one is at the path `fresh`.
    """
    target, old = package_and_old(folder, package)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    problems: Sequence[str] = ["not checked"]
    try:
        problems = module.check(folder)
    finally:
        if problems and not old.exists() and target.with_suffix(".mlmodelc").exists():
            remove(target)
        elif problems:
            restore(folder, package)
        elif old.exists():
            old.rename(fresh)  # no kill may leave a part of it where `restore` looks
    return problems


def restore(folder: Path, package: str) -> None:
    """Let an old package, if there is one, take the place of the fresh one."""
    target, old = package_and_old(folder, package)
    if old.exists():
        remove(target)
        old.rename(target)


def package_and_old(folder: Path, package: str) -> tuple[Path, Path]:
    """A package's own path, and that of the old one while a fresh one is checked."""
    return folder / f"{package}.mlpackage", folder.with_name(f".{folder.name}.{package}.old")
