"""Exports: programs as ONNX files, or a whole bundle as the folder of another runtime."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export import anemll, contract, coreai, coreml_llm
from cetane.export.refusals import (
    refuse_draft_heads,
    refuse_int8_activations,
    refuse_int8_caches,
    refuse_lost_constants,
)
from cetane.files import (
    Progress,
    check_files,
    check_outside,
    claimed,
    disk_errors,
    is_present,
    read_json,
    records,
    remove,
    replacing,
    silent,
    write_json,
)
from cetane.gates.anemll import judge_anemll
from cetane.gates.coreai import CoreAIResult, judge_coreai, unjudged
from cetane.gates.coreml_llm import judge_coreml_llm
from cetane.gates.quality import refuse_choices
from cetane.gates.verdict import Check
from cetane.mil import load
from cetane.pipeline.origin import checkpoint_of
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
class CoreAIFolder:
    """A folder that Apple's Core AI runner loads."""

    path: Path
    compile: str
    """The command that compiles its asset, on a Mac."""
    warnings: Sequence[str]
    """The patterns in its program that are known to run off the Neural Engine, or slowly."""
    result: CoreAIResult
    """The comparison with the bundle, in Apple's runtime on this machine."""


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


def export_onnx(
    source: str | Path, output: str | Path, *, progress: Progress = silent
) -> dict[str, list[str]]:
    """Write every function of a bundle or a .mlpackage as an ONNX file into a new folder.

    Returns the files of each package, as paths in the folder; a bundle's draft heads are packages
    too. The weights of a package are stored once. CetaneError if the folder exists or lies in
    `source`, for a damaged bundle, and for one with int8 caches.
    """
    from cetane.mil.fast.onnx_files import export as to_onnx  # onnx takes a while to load

    path = Path(source)
    target = new_folder(output, path)
    if path.suffix == ".mlpackage":
        packages = {path.stem: path}
    else:
        bundle = Bundle(path)
        bundle.verify()
        refuse_int8_caches(bundle.plan.recipe, "the layout onnx")
        packages = {shard.name: bundle.shard(shard.name) for shard in bundle.plan.shards}
        packages |= {str(kind): h.shard(kind) for kind, h in bundle.draft_heads().items()}
    written: dict[str, list[str]] = {}
    with writing(target, source), replacing(target) as folder:
        folder.mkdir()
        for name, package in packages.items():
            (folder / name).mkdir()
            files = to_onnx(load(package), folder / name, progress)
            written[name] = [f"{name}/{file.name}" for file in files.values()]
    return written


def export_contract(source: str | Path, output: str | Path, *, progress: Progress = silent) -> Path:
    """Write a bundle's packages with a description of every call, and a host in NumPy.

    Draft heads are taken along and described; the host decodes without them. Returns the folder.
    CetaneError if it exists, or if the bundle is damaged.
    """
    bundle = Bundle(Path(source))
    target = new_folder(output, bundle.path)
    bundle.verify()
    with writing(target, source):
        contract.export(bundle, target, progress)
    return target


def export_runtime(
    source: str | Path,
    output: str | Path,
    runtime: Runtime,
    *,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    progress: Progress = silent,
) -> RuntimeFolder:
    """Write a bundle as the folder that another runtime loads, check it, and judge its logits.

    `model` and `lora` say where the checkpoint and a merged adapter are, if they have moved.
    CetaneError if the folder exists, if the checkpoint is not the bundle's own, or if the runtime
    cannot run such a model.
    """
    bundle = Bundle(Path(source))
    target = new_folder(output, bundle.path)
    checkpoint = own_checkpoint(bundle, model, lora)
    module = RUNTIMES[runtime]
    with writing(target, source), replacing(target) as folder:
        module.export(bundle.plan.recipe, checkpoint, folder, progress)
        # Here: after a kill, no folder is there unchecked.
        made = RuntimeFolder(target, module, module.check(folder))
        if made.passed:
            checks, unjudged = JUDGES[runtime](bundle, checkpoint, folder, progress)
            made = replace(made, checks=checks, unjudged=unjudged)
        if made.passed:  # by this file the folder counts as one of the bundle's
            origin = Origin(bundle=bundle.digest, files=records(folder, folder))
            write_json(folder / ORIGIN, origin.model_dump())
    return made


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

    If the folder has a problem then, the old package comes back. `model` and `lora` are as in
    `export_runtime`. CetaneError if there is no such folder or package.
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
            if not problems and not is_judged(folder, package, bundle):
                remove(folder / ORIGIN)  # nothing has compared the fresh one with the bundle
        finally:
            remove(fresh)
        progress("done", 1, 1)
    return RuntimeFolder(Path(output), module, problems)


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


def changed_files(folder: Path, compiled: Collection[str]) -> list[str]:
    """Why a folder is not as it was when it was compared with its bundle, if it names one. Nobody
    can tell what is in its `compiled` packages."""
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
            if package_of(name) not in compiled
        }  # fmt: skip
        check_files(folder, there, "")
    except CetaneError as error:
        return [error.message]
    return []


def package_of(file: str) -> str:
    """The name of the package that a file of a folder is in; empty if it is in none."""
    first, _, rest = file.partition("/")
    return first.removesuffix(".mlpackage") if rest and first.endswith(".mlpackage") else ""


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


def export_coreai(
    source: str | Path,
    output: str | Path,
    *,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    progress: Progress = silent,
) -> CoreAIFolder:
    """Write a bundle as the folder that Apple's Core AI runner loads, and judge it.

    Apple's runtime runs the asset here, on the CPU. `model` and `lora` are as in `export_runtime`.
    Raises CetaneError if

    - the folder exists;
    - the checkpoint is not the bundle's own;
    - the bundle's head gives choices, so there are no logits to judge;
    - the model does not fit the runner's contract.
    """
    bundle = Bundle(Path(source))
    target = new_folder(output, bundle.path)
    refuse_choices(bundle)  # as the judge would, but after the conversion
    checkpoint = own_checkpoint(bundle, model, lora)
    with writing(target, source):
        judge = partial(judge_coreai, bundle)
        warnings, result = coreai.export(bundle, checkpoint, target, judge, progress)
    warnings += unjudged(bundle.plan)
    return CoreAIFolder(target, coreai.COMPILE.format(name=quote(target.name)), warnings, result)


def own_checkpoint(bundle: Bundle, model: str | Path | None, lora: str | Path | None) -> Checkpoint:
    """The checkpoint that a bundle was built from, once the bundle is verified.

    CetaneError for another checkpoint, without the fitted constants, and for what other runtimes
    lack: draft heads, adapters and 8-bit activations.
    """
    bundle.verify()
    refuse_lost_constants(bundle)
    refuse_int8_activations(bundle)
    refuse_draft_heads(bundle)
    if bundle.plan.adapters:
        raise CetaneError(
            f"{bundle.path} has adapters, which other runtimes do not know",
            "port the model with --lora FOLDER, which merges one",
        )
    checkpoint = checkpoint_of(bundle, model, lora)
    if checkpoint.fingerprint != bundle.manifest.fingerprint:
        raise CetaneError(
            f"{checkpoint.source} is not the checkpoint that {bundle.path} was built from: files "
            "have other names, sizes or dates",
            "a copy must keep the dates (cp -a, rsync -a); if you have none, port the model again",
        )
    return checkpoint


def new_folder(path: str | Path, source: Path) -> Path:
    """The path of a new folder; its parents are made.

    CetaneError if the path exists, or if it is inside `source`: a folder there would contradict
    the source's manifest.
    """
    target = Path(path)
    check_outside(target, source)
    refuse_existing(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextmanager
def writing(target: Path, source: str | Path) -> Iterator[None]:
    """A context that writes a new folder. CetaneError if the folder has appeared since its path was
    checked: a large bundle takes long to verify."""
    with claimed(target, f"exporting {source}"), disk_errors(target):
        refuse_existing(target)
        yield


def refuse_existing(target: Path) -> None:
    if target.exists():
        raise CetaneError(f"{target} exists", "choose another folder, or remove it")
