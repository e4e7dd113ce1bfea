"""Differences, op by op, between two programs, two bundles, or a bundle and its model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.diff import AgainstModel, ModelDiff, compare_bundles
from cetane.mil import MilFunction, Program, load
from cetane.mil.compare import Comparer
from cetane.mil.comparison import TOLERANCE, Comparison, OpGap
from cetane.mil.executor import Executable
from cetane.mil.gap import Gap
from cetane.mil.inputs import random_inputs, read_inputs
from cetane.mil.program import Precision, listed
from cetane.pipeline.origin import checkpoint_of, other_checkpoint
from cetane.schema.manifest import MANIFEST
from cetane.schema.recipe import Mode


@dataclass(frozen=True)
class DiffResult:
    """Comparisons, and whether everything lies within the tolerance."""

    tolerance: float
    """The relative error of one op up to which both sides count as equal."""
    parts: Mapping[str, Comparison]
    """By place: a function, or a shard and a function."""
    tables: Mapping[str, Gap] = field(default_factory=dict)
    """The differences of two bundles' host tables, in the rows that were used."""
    model: ModelDiff | None = None
    """Every shard compared with the model; None without a `model`."""
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        if self.model is not None and self.model.suspect is not None:
            return False
        if any(gap.relative > self.tolerance for gap in self.tables.values()):
            return False
        return not any(part.parted(self.tolerance) for part in self.parts.values())

    @property
    def doubts(self) -> list[str]:
        """Warnings: of the checkpoint, and of outputs that are equal only because both are NaN."""
        unknown = [
            f"{place} {name}: {gap.unknown:.0%} of the first's values are NaN: they tell nothing"
            for place, part in self.parts.items()
            for name, gap in part.outputs.items()
            if gap.unknown
        ]
        return [*self.warnings, *unknown]

    def as_json(self, top: int = 10) -> dict[str, Any]:
        """The comparisons as a JSON object, `top` ops of each."""
        content: dict[str, Any] = {"passed": self.passed, "tolerance": self.tolerance}
        content |= {"warnings": self.doubts}
        if self.model is not None:
            content |= {
                "handed": [asdict(handed) for handed in self.model.handed],
                "suspect": self.model.suspect,
                "stages": [asdict(stage) for stage in self.model.stages],
                "cause": self.model.cause,
            }
        elif self.tables:
            content["tables"] = {name: asdict(gap) for name, gap in self.tables.items()}
        parts = {place: part_json(part, self.tolerance, top) for place, part in self.parts.items()}
        return content | {"parts": parts}


def diff(
    first: str | Path,
    second: str | Path | None = None,
    *,
    model: str | Path | None = None,
    function: str | None = None,
    precision: Precision | None = None,
    inputs: Path | None = None,
    tolerance: float = TOLERANCE,
    progress: Progress = silent,
) -> DiffResult:
    """Compare two packages, two bundles, or a bundle and its model.

    `first` is the reference, and runs in fp32. Without a `second`, `first` is compared with itself
    at another `precision`, or with a `model`. `function` names a function of packages, or a mode
    of bundles; the default is a package's own default, or the widest mode. `inputs` is an .npz file
    with an array for each input of a package. CetaneError for options that exclude each other, an
    unknown function or mode, a tolerance that is NaN or below 0, and a damaged bundle.

    >>> cetane.diff(bundle, precision="fp16", function="decode", tolerance=1.0).passed
    True
    """
    if not tolerance >= 0:  # NaN too: nothing is larger than NaN, so everything would pass
        raise CetaneError(
            f"tolerance = {tolerance}: must be at least 0", f"the default is {TOLERANCE}"
        )
    one, other = Path(first), None if second is None else Path(second)
    if model is None and other is None and precision is None:
        raise CetaneError(
            f"nothing to compare {first} with",
            "name a second package or bundle, a --model, or --precision fp16",
        )
    bundles = (one / MANIFEST).is_file()
    if not bundles and model is not None:
        raise CetaneError(f"{first} is not a bundle", "--model judges a bundle")
    if bundles and inputs is not None:
        raise CetaneError("--inputs is for packages", "a bundle's inputs come from the engine")
    if model is not None and (other, precision) != (None, None):
        raise CetaneError(
            "--model compares one bundle, in fp32 and in fp16",
            "leave out the second bundle and --precision",
        )
    if model is not None:
        return against_model(one, model, function, tolerance, progress)
    second_precision: Precision = precision or "fp32"
    if not bundles:
        parts = package_pair(one, other or one, function, second_precision, inputs, progress)
        return DiffResult(tolerance, parts)
    left, right = verified(one), verified(other or one)
    comparisons, tables = compare_bundles(
        left, right, mode_of(left, function), second_precision, progress
    )
    return DiffResult(tolerance, by_place(comparisons), tables)


def package_pair(
    first: Path,
    second: Path,
    function: str | None,
    precision: Precision,
    inputs: Path | None,
    progress: Progress,
) -> dict[str, Comparison]:
    """Compare a function of two packages."""
    one, other = (function_of(load(path), function) for path in (first, second))
    progress("loading", 0, 2)
    comparer = Comparer(Executable(one, "fp32"), Executable(other, precision))
    progress("running", 1, 2)
    given = random_inputs(one) if inputs is None else read_inputs(inputs, one)
    result = comparer(given)
    progress("done", 2, 2)
    return {one.name: result}


def function_of(program: Program, name: str | None) -> MilFunction:
    """A function by name; without one, the program's default. CetaneError if it is unknown."""
    wanted = name or program.default
    if wanted not in program.functions:
        raise CetaneError(
            f"{program.path}: no function {wanted!r}; it has {listed(program.functions)}"
        )
    return program.functions[wanted]


def against_model(
    path: Path, model: str | Path, function: str | None, tolerance: float, progress: Progress
) -> DiffResult:
    """Compare all shards of a bundle with the model."""
    bundle = verified(path)
    progress("reading the model", 0, 1)
    checkpoint = checkpoint_of(bundle, model)
    found = AgainstModel(bundle, checkpoint, mode_of(bundle, function)).run(tolerance, progress)
    warnings = tuple(other_checkpoint(bundle, checkpoint))
    return DiffResult(tolerance, by_place(found.comparisons), model=found, warnings=warnings)


def verified(path: Path) -> Bundle:
    """A bundle of which every file has its recorded hash; CetaneError otherwise."""
    bundle = Bundle(path)
    bundle.verify()
    return bundle


def mode_of(bundle: Bundle, name: str | None) -> Mode:
    """A mode of a bundle by name; without one, the widest. CetaneError if it is unknown."""
    modes = bundle.plan.modes
    for known in modes:
        if known == name:
            return known
    if name is not None:
        raise CetaneError(f"{bundle.path}: no mode {name!r}; it has {listed(modes)}")
    return max(modes, key=lambda mode: modes[mode].tokens)


def by_place(comparisons: Mapping[tuple[str, str], Comparison]) -> dict[str, Comparison]:
    return {f"{shard}/{function}": part for (shard, function), part in comparisons.items()}


def part_json(part: Comparison, tolerance: float, top: int) -> dict[str, Any]:
    """A comparison as a JSON object."""
    own, total = part.first_own(tolerance), part.first_total(tolerance)
    return {
        "compared": len(part.ops),
        "first_own": own and op_json(own),
        "first_total": total and op_json(total),
        "ops": [op_json(op) for op in worst_first(part.ops)[:top]],
        "largest": [op_json(op) for op in sorted(part.ops, key=lambda op: -op.largest)[:top]],
        "outputs": {name: asdict(gap) for name, gap in part.outputs.items()},
        "own_outputs": {name: asdict(gap) for name, gap in part.own_outputs.items()},
        "only_first": part.only_first,
        "only_second": part.only_second,
    }


def op_json(op: OpGap) -> dict[str, Any]:
    return asdict(op) | {"causes": op.causes}


def worst_first(ops: tuple[OpGap, ...]) -> list[OpGap]:
    """Ops by their own error, the largest first."""
    return sorted(ops, key=lambda op: -op.own.relative)
