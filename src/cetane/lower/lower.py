"""Shards to packages: one conversion for every structure, then weights alone."""

import filecmp
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cetane.compress import Sensitivities
from cetane.compress.encoded import Encoded
from cetane.errors import CetaneError
from cetane.families import Weights
from cetane.lower.convert import Constants, convert_shard
from cetane.lower.structure import structure
from cetane.lower.template import Template, used_by
from cetane.lower.tracing import Constant
from cetane.planner import Programs


class Lowering:
    """Writes the packages of a plan's shards; keeps what shards of one structure have in common."""

    def __init__(self, planner: Programs, weights: Weights) -> None:
        self.planner, self.weights = planner, weights
        counted = planner.recipe.compression.sensitivity
        self.sensitivities = counted.read() if counted else None
        self._structures: dict[str, str] = {}
        self._templates: dict[str, Template] = {}

    def structure(self, shard: str) -> str:
        """A hash of all that the shard's programs depend on, the values of its weights aside."""
        if shard not in self._structures:
            self._structures[shard] = structure(self.planner, shard)
        return self._structures[shard]

    def kinds(self) -> dict[str, list[str]]:
        """The shards of every structure, in order."""
        kinds: dict[str, list[str]] = {}
        for shard in self.planner.members:
            kinds.setdefault(self.structure(shard), []).append(shard)
        return kinds

    def lower(self, shard: str, target: Path) -> None:
        """Write the package of a shard to `target`, which must not exist.

        The first shard of a structure is converted; the others take seconds. Raises CetaneError
        for a weight that is damaged, or that its format cannot hold.
        """
        with scratch(target) as folder:
            self._template(shard, folder).stamp(self.constants(shard), folder / "stamped")
            (folder / "stamped").rename(target)

    def verify(self, shard: str, package: Path) -> None:
        """CetaneError unless `package` is, byte by byte, the shard converted on its own."""
        with scratch(package) as folder:
            slow = folder / "slow.mlpackage"
            convert_shard(self.planner, shard, self.constants(shard), slow)
            for path in files(slow) | files(package):
                pair = slow / path, package / path
                if not all(p.is_file() for p in pair) or not filecmp.cmp(*pair, shallow=False):
                    raise CetaneError(f"{package / path} is not what converting {shard} makes")

    def constants(self, shard: str) -> Constants:
        """The constant of every label of a shard, read and encoded at every call."""
        used = used_by(self.planner, shard)
        return lambda label: encode(used[label], self.weights, self.sensitivities)

    def _template(self, shard: str, folder: Path) -> Template:
        key = self.structure(shard)
        if key not in self._templates:
            self._templates[key] = Template(self.planner, shard, folder / "template.mlpackage")
            shutil.rmtree(folder / "template.mlpackage")
        return self._templates[key]


def encode(item: Constant, weights: Weights, sensitivities: Sensitivities | None = None) -> Encoded:
    """A weight as its format stores it, made from its fp16 values."""
    weight = item.weight
    values = weight.read(weights).to(torch.float16).numpy()
    counts = None
    if sensitivities and item.format.weighted:
        counts = sensitivities.of(weight.name, weight.shape, weight.columns)
    try:
        return item.format.encode(values, counts)
    except CetaneError as error:
        raise CetaneError(f"{item.weight.name}: {error.message}", error.hint) from error


def files(package: Path) -> set[Path]:
    """Paths of a package's files, from its folder."""
    return {path.relative_to(package) for path in package.rglob("*") if path.is_file()}


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A folder beside `target`, on the same disk, that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lower-") as folder:
        yield Path(folder)
