"""The size of a bundle on disk, and the mean bits of its stored weights."""

from collections.abc import Mapping

from cetane.bundle import Bundle
from cetane.gates.residency.graph import Graph
from cetane.gates.residency.target import Target
from cetane.mil.program import Program
from cetane.report.content.figures import DiskUse, PartSize
from cetane.schema.function import ShardPlan, Step
from cetane.schema.manifest import shard_path


def sizes(bundle: Bundle, programs: Mapping[str, Program]) -> DiskUse:
    """Bytes on disk of shards, of the host's tables, and of draft heads."""
    parts: dict[str, int] = {shard_path(shard.name): 0 for shard in bundle.plan.shards}
    parts |= by_part({name: record.bytes for name, record in bundle.manifest.files.items()})
    for kind, head in bundle.draft_heads().items():
        parts[f"heads/{kind}"] = sum(record.bytes for record in head.manifest.files.values())
    weights = {
        shard_path(shard.name): stored(bundle, shard, programs[shard.name])
        for shard in bundle.plan.shards
    }
    elements = sum(count for count, _ in weights.values())
    nbytes = sum(size for _, size in weights.values())
    largest = max(parts.values())
    return DiskUse(
        bytes=sum(parts.values()),
        weights=elements,
        mean_bits=mean(elements, nbytes) or 0.0,
        parts=tuple(
            PartSize(
                name=plain_name(name),
                bytes=count,
                share=count / largest,
                weights=weights[name][0] if name in weights else None,
                bits=mean(*weights[name]) if name in weights else None,
            )
            for name, count in parts.items()
        ),
        caches=dict(bundle.plan.kv_bytes),
    )


def by_part(files: Mapping[str, int]) -> dict[str, int]:
    """The bytes of a folder's parts, from those of its files: packages of shards, draft heads,
    other folders and single files."""
    parts: dict[str, int] = {}
    for name, size in files.items():
        top = "/".join(name.split("/")[: 2 if name.startswith(("shards/", "heads/")) else 1])
        parts[top] = parts.get(top, 0) + size
    return parts


def plain_name(part: str) -> str:
    """A part's name as pages show it."""
    return part.removeprefix("shards/").removesuffix(".mlpackage")


def stored(bundle: Bundle, shard: ShardPlan, program: Program) -> tuple[int, int]:
    """Elements and bytes of a shard's weights: those that the functions of `decode` read."""
    elements = nbytes = 0
    for step in bundle.plan.modes["decode"].steps:
        if step.shard == shard.name:
            names = [step.function] if isinstance(step, Step) else [e[0] for e in step.experts]
            for name in names:
                graph = Graph(program.functions[name], Target())
                # Shapes and axes are constants too, but not weights: weights become fp16.
                weights = [w for w in graph.weights.values() if w.dtype == "fp16"]
                elements += sum(weight.elements for weight in weights)
                nbytes += sum(weight.nbytes for weight in weights)
    return elements, nbytes


def mean(elements: int, nbytes: int) -> float | None:
    """The mean bits of an element; None if there are none."""
    return 8 * nbytes / elements if elements else None
