"""Packages are read as they lie, and rewritten only on request."""

from collections.abc import Callable
from pathlib import Path

from cetane.bundle import Bundle
from cetane.lower.package import read_spec, single_function


def test_reading_writes_nothing(tiny_bundle: Callable[..., Bundle]) -> None:
    """coremltools' own reader writes the manifest anew."""
    bundle = tiny_bundle()
    package = bundle.shard(bundle.plan.shards[0].name)
    files = [path for path in package.rglob("*") if path.is_file()]

    def dates(paths: list[Path]) -> list[int]:
        return [path.stat().st_mtime_ns for path in paths]

    before = dates(files)
    spec = read_spec(package)
    names = [function.name for function in spec.description.functions]
    single = single_function(package, names[0])
    assert [*single.get_spec().mlProgram.functions] == ["main"]
    assert dates(files) == before
