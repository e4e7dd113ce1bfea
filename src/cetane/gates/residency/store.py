"""What can be audited: packages and bundles, and where their measurements and verdicts are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cetane.errors import CetaneError
from cetane.files import disk_errors, replacing
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.measured import (
    Measured,
    parse_measured,
    read_measured,
    specification,
    with_kept,
)

if TYPE_CHECKING:
    from cetane.bundle import Bundle

GATE, MEASURED = "residency", "residency-measured"
UNWRITTEN = "the bundle is read-only, so this is not kept"


class Artifact(Protocol):
    """A package, or the packages of a bundle."""

    @property
    def packages(self) -> dict[str, Path]: ...
    def measured(self) -> Measured | None:
        """The stored measurements; None if there are none."""

    def keep(self, measured: Measured) -> bool:
        """Store measurements in place of older ones. Returns False if the place is read-only."""

    def judge(self, verdict: Audit) -> None:
        """Store the verdict, where there is a place for it."""


def open_artifact(path: Path) -> Artifact:
    """A package, alone or of a bundle, or a bundle with unchanged files. Raises CetaneError for
    anything else."""
    # A file system that ignores case finds either manifest by the other's name, so list the names.
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if "manifest.json" in names:
        from cetane.bundle import Bundle  # needs torch, which takes seconds to import

        bundle = Bundle(path)
        bundle.verify()
        return InBundle(bundle)
    if "Manifest.json" in names:
        return of_bundle(path) or Single(path)
    raise CetaneError(f"{path}: neither an .mlpackage nor a bundle", "cetane port MODEL makes one")


def of_bundle(package: Path) -> PartOfBundle | None:
    """A package as its bundle lists it, such as `BUNDLE/shards/NAME.mlpackage`; None for one that
    belongs to no bundle."""
    place = package.resolve()
    for root in place.parents[1:3]:  # heads/KIND/ is two folders
        held = place.relative_to(root).parts[0] in ("shards", "heads")
        if held and (root / "manifest.json").is_file():
            from cetane.bundle import Bundle  # as above

            whole = InBundle(Bundle(root))
            for name, listed in whole.packages.items():
                if listed == place:
                    return PartOfBundle(whole, name)
    return None


@dataclass(frozen=True)
class Single:
    """One package that belongs to no bundle; measurements lie beside it."""

    path: Path

    @property
    def packages(self) -> dict[str, Path]:
        return {self.path.resolve().stem: self.path}

    @property
    def beside(self) -> Path:
        path = self.path.resolve()
        return path.with_name(f"{path.stem}.measured.json")

    def measured(self) -> Measured | None:
        if not self.beside.exists():
            return None
        return same_build(read_measured(self.beside), self.packages)

    def keep(self, measured: Measured) -> bool:
        with disk_errors(self.beside), replacing(self.beside) as temporary:
            temporary.write_text(measured.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return True

    def judge(self, verdict: Audit) -> None:
        """Does nothing: a package has no place for a verdict."""


def same_build(kept: Measured, packages: Mapping[str, Path]) -> Measured | None:
    """The measurements of the packages that have not changed since; None if there are none.

    A package may have been built again, or a draft head trained again."""
    own = {
        name: package
        for name, package in kept.packages.items()
        if name in packages and package.specification == specification(packages[name])
    }
    return kept.model_copy(update={"packages": own}) if own else None


@dataclass(frozen=True)
class InBundle:
    """The shards of a bundle and its draft heads. Measurements and verdict are kept with the
    bundle's other gates."""

    bundle: Bundle

    @property
    def packages(self) -> dict[str, Path]:
        shards = {shard.name: self.bundle.shard(shard.name) for shard in self.bundle.plan.shards}
        return shards | {kind: head.shard(kind) for kind, head in self.bundle.draft_heads().items()}

    def measured(self) -> Measured | None:
        kept = self.bundle.gates().get(MEASURED)
        if kept is None:
            return None
        return same_build(
            parse_measured(kept.get("measured"), str(self.bundle.path)), self.packages
        )

    def keep(self, measured: Measured) -> bool:
        return self.bundle.write_gate(MEASURED, {"measured": measured.model_dump(mode="json")})

    def judge(self, verdict: Audit) -> None:
        heads = {kind: head.digest for kind, head in self.bundle.draft_heads().items()}
        self.bundle.write_gate(GATE, summary(verdict) | {"heads": heads})


@dataclass(frozen=True)
class PartOfBundle:
    """One package of a bundle. Its measurements are kept with those of the bundle's others, since a
    bundle holds no file that its manifest does not list."""

    whole: InBundle
    name: str

    @property
    def packages(self) -> dict[str, Path]:
        return {self.name: self.whole.packages[self.name]}

    def measured(self) -> Measured | None:
        kept = self.whole.measured()
        return None if kept is None else same_build(kept, self.packages)

    def keep(self, measured: Measured) -> bool:
        own = measured.model_copy(update={"packages": {self.name: measured.packages[self.name]}})
        return self.whole.keep(with_kept(own, self.whole.measured()))

    def judge(self, verdict: Audit) -> None:
        """Does nothing: a bundle's verdict is about all of its packages."""


def summary(verdict: Audit) -> dict[str, object]:
    """An audit as a gate's result: the verdict, and the rules that apply with their severity."""
    return {
        "passed": verdict.passed,
        "basis": verdict.basis,
        "target": str(verdict.target),
        "reasons": list(verdict.reasons),
        "findings": verdict.severities,
    }
