"""Exports: programs as ONNX files, or a whole bundle as the folder of another runtime."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export import contract, coreai
from cetane.export.refusals import (
    refuse_draft_heads,
    refuse_int8_activations,
    refuse_int8_caches,
    refuse_lost_constants,
)
from cetane.files import (
    Progress,
    check_outside,
    claimed,
    disk_errors,
    records,
    replacing,
    silent,
    write_json,
)
from cetane.gates.coreai import CoreAIResult, judge_coreai, unjudged
from cetane.gates.quality import refuse_choices
from cetane.gates.verdict import Check
from cetane.mil import load
from cetane.pipeline.origin import checkpoint_of
from cetane.pipeline.runtime_folder import JUDGES, RUNTIMES, RuntimeFolder
from cetane.schema.manifest import ORIGIN, Origin, Runtime


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
class OnnxFolder:
    """A folder of ONNX files."""

    path: Path
    files: Mapping[str, Sequence[str]]
    """By package, its files, as paths in the folder."""
    checks: Sequence[Check]
    """The comparison of each package's files with its program."""
    unjudged: Sequence[str]
    """The functions that no comparison has reached, and why."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.path), "passed": self.passed, "files": self.files,
            "checks": [check.model_dump(mode="json") for check in self.checks],
            "unjudged": self.unjudged,
        }  # fmt: skip


def export_onnx(
    source: str | Path, output: str | Path, *, progress: Progress = silent
) -> OnnxFolder:
    """Write every function of a bundle or a .mlpackage as an ONNX file into a new folder, and
    compare the files with the programs in onnxruntime.

    A bundle's draft heads are packages too. The weights of a package are stored once. CetaneError
    if the folder exists or lies in `source`, for a damaged bundle, and for one with int8 caches.
    """
    from cetane.gates.onnx_files import judge_onnx
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
    written, checks, unjudged = dict[str, list[str]](), list[Check](), list[str]()
    with writing(target, source), replacing(target) as folder:
        folder.mkdir()
        for name, package in packages.items():
            (folder / name).mkdir()
            program = load(package)
            files = to_onnx(program, folder / name, progress)
            written[name] = [f"{name}/{file.name}" for file in files.values()]
            own, missed = judge_onnx(name, program, files)
            checks, unjudged = [*checks, *own], [*unjudged, *missed]
    return OnnxFolder(target, written, checks, unjudged)


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
