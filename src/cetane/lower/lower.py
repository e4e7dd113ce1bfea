"""Lowering: writes the packages of shards, with one conversion for each structure."""

import filecmp
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cetane.errors import CetaneError
from cetane.families import Weights
from cetane.lower.convert import Conversions, convert_shard
from cetane.lower.converted import ConstantOf
from cetane.lower.kept import keep_template, kept_template
from cetane.lower.package import annotate
from cetane.lower.structure import structure
from cetane.lower.template import Template, shard_weights
from cetane.planner import Encoder, Programs


class Lowering:
    """Writes the packages of a plan's shards, and keeps the template of each structure."""

    def __init__(
        self, planner: Programs, weights: Weights, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Every package gets `metadata`."""
        self.planner, self.weights, self.metadata = planner, weights, dict(metadata or {})
        self.encode = Encoder(weights, planner.recipe.compression)
        self.conversions = Conversions(planner)
        self._structures: dict[str, str] = {}
        self._templates: dict[str, Template] = {}

    def structure(self, shard: str) -> str:
        """A hash of all that the shard's programs depend on, except the values of weights."""
        if shard not in self._structures:
            self._structures[shard] = structure(self.planner, self.conversions.forms(shard))
        return self._structures[shard]

    def kinds(self) -> dict[str, list[str]]:
        """The shards of every structure, in order."""
        kinds: dict[str, list[str]] = {}
        for shard in self.planner.members:
            kinds.setdefault(self.structure(shard), []).append(shard)
        return kinds

    def lower(self, shard: str, target: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the package of a shard to `target`, which must not exist. Only this package gets
        `metadata`.

        Only the first shard of a structure is converted; the others take seconds. Raises
        CetaneError for a damaged weight, or one that its format cannot hold.
        """
        with scratch(target) as folder:
            every = self.metadata | dict(metadata or {})
            self._template(shard, folder).stamp(self.constants(shard), folder / "stamped", every)
            (folder / "stamped").rename(target)

    def verify(self, shard: str, package: Path) -> None:
        """Raise CetaneError unless `package` equals, byte by byte, the shard converted alone."""
        with scratch(package) as folder:
            slow = folder / "slow.mlpackage"
            convert_shard(self.planner, shard, self.constants(shard), slow)
            annotate(slow, self.metadata)
            for path in files(slow) | files(package):
                pair = slow / path, package / path
                if not all(p.is_file() for p in pair) or not filecmp.cmp(*pair, shallow=False):
                    raise CetaneError(f"{package / path} differs from a new conversion of {shard}")

    def constants(self, shard: str) -> ConstantOf:
        """A function that gives the constant of a label. Each call reads and encodes the weight
        anew."""
        used = shard_weights(self.planner, shard)
        return lambda label: self.encode(used[label].weight)

    def _template(self, shard: str, folder: Path) -> Template:
        key = self.structure(shard)
        if key not in self._templates:
            labels = shard_weights(self.planner, shard)
            self._templates[key] = kept_template(key, labels) or self._converted(shard, folder)
        return self._templates[key]

    def _converted(self, shard: str, folder: Path) -> Template:
        package = folder / "template.mlpackage"
        template = Template.converted(self.planner, shard, package, self.conversions)
        shutil.rmtree(package)
        keep_template(self.structure(shard), template)
        return template


def files(package: Path) -> set[Path]:
    """The paths of a package's files, relative to its folder."""
    return {path.relative_to(package) for path in package.rglob("*") if path.is_file()}


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A context with a folder beside `target`, on the same disk, which is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lower-") as folder:
        yield Path(folder)
