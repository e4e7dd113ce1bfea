"""Exports: programs as ONNX files, or a whole bundle as the folder of another runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export import coreai, coreml_llm
from cetane.files import Progress, check_outside, claimed, disk_errors, replacing, silent
from cetane.gates.coreai import CoreAIResult, judge_coreai
from cetane.mil import load
from cetane.pipeline.validate import checkpoint_of


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
    compile: str
    """The command that compiles its packages, on a Mac."""
    problems: Sequence[str]
    """The parts of the runtime's contract that the folder breaks."""


def export_onnx(
    source: str | Path, output: str | Path, *, progress: Progress = silent
) -> dict[str, list[str]]:
    """Write every function of a bundle or a .mlpackage as an ONNX file into a new folder.

    Returns the files of each package, as paths in the folder. The weights of a package are stored
    once. CetaneError if the folder exists.
    """
    from cetane.mil.fast.onnx_files import export as to_onnx  # onnx takes a while to load

    path = Path(source)
    target = new_folder(output, path)
    if path.suffix == ".mlpackage":
        packages = {path.stem: path}
    else:
        bundle = Bundle(path)
        bundle.verify()
        packages = {shard.name: bundle.shard(shard.name) for shard in bundle.plan.shards}
    written: dict[str, list[str]] = {}
    with claimed(target, f"exporting {path}"), disk_errors(target), replacing(target) as folder:
        folder.mkdir()
        for name, package in packages.items():
            (folder / name).mkdir()
            files = to_onnx(load(package), folder / name, progress)
            written[name] = [f"{name}/{file.name}" for file in files.values()]
    return written


def export_coreml_llm(
    source: str | Path, output: str | Path, *, progress: Progress = silent
) -> RuntimeFolder:
    """Write a bundle as the folder that CoreML-LLM's runtime loads, and check it.

    CetaneError if the folder exists, or if the checkpoint is not the bundle's own.
    """
    bundle = Bundle(Path(source))
    target = new_folder(output, bundle.path)
    checkpoint = own_checkpoint(bundle)
    with claimed(target, f"exporting {source}"):
        coreml_llm.export(bundle, checkpoint, target, progress)
    return RuntimeFolder(target, coreml_llm.COMPILE, coreml_llm.check(target))


def export_coreai(
    source: str | Path, output: str | Path, *, progress: Progress = silent
) -> CoreAIFolder:
    """Write a bundle as the folder that Apple's Core AI runner loads, and judge it.

    Apple's runtime runs the asset here, on the CPU. CetaneError if the folder exists, if the
    checkpoint is not the bundle's own, or if the model does not fit their contract.
    """
    bundle = Bundle(Path(source))
    target = new_folder(output, bundle.path)
    checkpoint = own_checkpoint(bundle)
    with claimed(target, f"exporting {source}"), disk_errors(target):
        judge = partial(judge_coreai, bundle)
        warnings, result = coreai.export(bundle, checkpoint, target, judge, progress)
    return CoreAIFolder(target, coreai.COMPILE.format(name=target.name), warnings, result)


def own_checkpoint(bundle: Bundle) -> Checkpoint:
    """The checkpoint that a verified bundle was built from; CetaneError if it is another."""
    bundle.verify()
    if bundle.plan.adapters:
        raise CetaneError(
            f"{bundle.path} has adapters, which other runtimes do not know",
            "port the model with --lora FOLDER, which merges one",
        )
    checkpoint = checkpoint_of(bundle)
    if checkpoint.fingerprint != bundle.manifest.fingerprint:
        raise CetaneError(
            f"{checkpoint.source} is not the checkpoint that {bundle.path} was built from",
            "port the model again",
        )
    return checkpoint


def new_folder(path: str | Path, source: Path) -> Path:
    """The path of a new folder; its parents are made.

    CetaneError if the path exists, or if it is inside `source`: a folder there would contradict
    the source's manifest.
    """
    target = Path(path)
    check_outside(target, source)
    if target.exists():
        raise CetaneError(f"{target} exists", "choose another folder, or remove it")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    return target
