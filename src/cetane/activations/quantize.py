"""The quantization of a bundle's activations to 8 bits; its weights stay unchanged."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from cetane.activations.calibrate import calibrate
from cetane.activations.passes import Tensors, quantize_package
from cetane.activations.samples import Traces, conversations, random_samples
from cetane.activations.smooth import smooth, smoothing_planner
from cetane.activations.temporary import temporary_folder
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import (
    Progress,
    check_outside,
    claimed,
    disk_errors,
    records,
    replacing,
    write_json,
)
from cetane.pipeline.build import build
from cetane.planner import Planner
from cetane.schema.manifest import MANIFEST, Manifest, producers, shard_path
from cetane.schema.plan import Plan
from cetane.validation import Data

SUFFIX = "-a8"
"""The end of the new recipe's name."""


class Options(Data):
    """Options of the quantization. docs/explanation/activations.md explains the defaults."""

    samples: Literal["real", "random"] = "real"
    """The engine's own calls for 34 prompts and their answers, or five calls of random numbers."""
    ranges: Literal["all", "last"] = "all"
    """The samples whose ranges count. coremltools 9 itself keeps only those of the last sample."""
    tensors: Tensors = "inputs"
    """The tensors that are rounded. coremltools 9 itself rounds all."""
    additions: bool = False
    """Whether additions are quantized too, which is coremltools' default. One of them adds a mask
    of -4e4, whose range leaves nothing for the scores."""
    smooth: bool = False
    """Whether SmoothQuant first moves the channels' outliers into the weights. It needs the
    checkpoint, and a model of which every layer has places for it (`Block.exchanges`)."""


NAIVE = Options(samples="random", ranges="last", tensors="all", additions=True)
"""The options of CoreML-LLM's experiment 3.9."""


class Quantized(Data):
    """A record of the quantization of a bundle."""

    options: Options
    samples: int
    """The number of calls that calibrated, over all shards."""
    quantized: int
    """The number of tensors rounded to 8 bits in one call of every shard."""


def quantize_activations(
    bundle: Bundle, target: Path, options: Options, progress: Progress,
    checkpoint: Checkpoint | None = None, force: bool = False,
) -> tuple[Bundle, Quantized]:  # fmt: skip
    """Write a bundle to `target` whose convolutions read int8, and with `tensors = "all"` write it.

    Weights stay unchanged. Each tensor has one symmetric scale, which all functions of a shard
    share. `checkpoint` is the bundle's own, needed only to `smooth`. Raises CetaneError if `target`
    exists, unless it is a bundle and `force`. Raises it too for states, flexible shapes and routed
    experts, for activations that are already quantized, for what cannot be smoothed
    (`smoothing_planner`), and for a full disk.
    """
    with quantized(bundle, target, options, progress, checkpoint, force) as (_, made):
        pass
    return Bundle(target), made


@contextmanager
def quantized(
    bundle: Bundle, target: Path, options: Options, progress: Progress,
    checkpoint: Checkpoint | None, force: bool,
) -> Iterator[tuple[Bundle, Quantized]]:  # fmt: skip
    """A context with the new bundle of `quantize_activations`, and the record of it.

    The bundle has a temporary name while the context lasts, and takes its place at the end: what is
    judged in the context is never there unjudged.
    """
    check_calibratable(bundle.plan, bundle.path)
    if bundle.int8_activations:
        raise CetaneError(f"{bundle.path}: its activations are quantized already")
    if target.exists() and not (force and (target / MANIFEST).is_file()):
        raise CetaneError(f"{target} exists", "choose another folder; --force replaces a bundle")
    check_outside(target, bundle.path)
    planner = None
    if options.smooth:
        if checkpoint is None:
            raise CetaneError(
                "smoothing changes weights, so it needs the checkpoint", "give it as `checkpoint`"
            )
        planner = smoothing_planner(checkpoint, bundle.plan, bundle.path)
    with (
        claimed(target, f"quantizing {bundle.path}"), disk_errors(target),
        replacing(target) as partial,
    ):  # fmt: skip
        yield write(bundle, partial, options, progress, checkpoint, planner)


def write(
    bundle: Bundle, partial: Path, options: Options, progress: Progress,
    checkpoint: Checkpoint | None, planner: Planner | None,
) -> tuple[Bundle, Quantized]:  # fmt: skip
    """Write the new bundle to `partial`. Channels are smoothed if there is a `planner`."""
    source, shards = bundle.manifest, bundle.plan.shards
    with temporary_folder() as folder:
        texts = conversations(bundle) if options.samples == "real" or options.smooth else []
        if checkpoint is not None and planner is not None:
            progress("smoothing", 0, len(shards))
            smoothed = smooth(checkpoint, planner, texts)
            bundle = build(smoothed, bundle.plan.recipe, folder / "smooth", progress)
        copy_all_but_shards(bundle, partial)
        traces = Traces(bundle, texts) if options.samples == "real" else None
        samples = rounded = 0
        for index, shard in enumerate(shards):
            progress(shard.name, index, len(shards))
            calls = traces.shard(shard.name) if traces else random_samples(shard)
            if options.ranges == "last":
                calls = {function: some[-1:] for function, some in calls.items()}
            package = bundle.shard(shard.name)
            ranges = calibrate(package, calls)
            made = partial / shard_path(shard.name)
            rounded += quantize_package(package, ranges, options.tensors, options.additions, made)
            samples += sum(map(len, calls.values()))
        write_json(partial / MANIFEST, manifest(source, partial).model_dump(mode="json"))
        progress("done", len(shards), len(shards))
    return Bundle(partial), Quantized(options=options, samples=samples, quantized=rounded)


def check_calibratable(plan: Plan, path: Path) -> None:
    """Raise CetaneError for a bundle whose programs coremltools cannot calibrate."""
    recipe = plan.recipe
    for wrong, what, hint in (
        (any(f.states for f in plan.functions.values()), "states",
         'cache.contract = "readonly"'),
        (recipe.tokens.shapes == "range", "flexible shapes", 'tokens.shapes = "static"'),
        (bool(recipe.layout.routed), "experts as functions", "layout.routed = []"),
        (bool(plan.adapters), "adapters beside a base", "--lora in place of --adapter"),
    ):  # fmt: skip
        if wrong:
            raise CetaneError(
                f"{path} has {what}, which coremltools does not calibrate",
                f"port it with {hint}",
            )


def copy_all_but_shards(bundle: Bundle, folder: Path) -> None:
    """Copy the other files that the bundle's manifest lists: no gates' results, no draft heads,
    which read another bundle's hidden states, and nothing of the hub."""
    packages = bundle.manifest.package_files
    for name in bundle.manifest.files:
        if name not in packages:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(bundle.file(name), folder / name)


def manifest(source: Manifest, folder: Path) -> Manifest:
    """The manifest of the files in `folder`, with the plan of `source` and a new recipe name."""
    recipe = source.plan.recipe
    text = f"{recipe.description} Activations of 8 bits.".strip()
    renamed = recipe.model_copy(update={"name": recipe.name + SUFFIX, "description": text})
    return source.model_copy(update={
        "producer": producers(),
        "plan": source.plan.model_copy(update={"recipe": renamed}),
        "files": records(folder, folder),
    })  # fmt: skip
